# frozen_string_literal: true

require "test_helper"

class TestGuard < VolcanoTest
  def setup
    @clock = ManualClock.new
    @script = :be_good.to_proc
    @server = ScriptedServer.open { |request| @script.call(request) }
    @locks = client(@server.url, clock: @clock).locks
  end

  def teardown
    @holders&.each(&:kill)
    super
    @server.close
  end

  # A process that was stopped, or a host that slept, looks before any timer runs.
  def test_the_first_look_after_a_pause_sees_the_loss
    error = assert_raises(Volcano::Error::LockLostError) do
      @locks.with_lock("k", ttl: 5) do |guard|
        refute_predicate(guard, :lost?)
        @clock.jump(3.9)
        guard.check!
        @clock.jump(0.2)
        assert_predicate(guard, :lost?)
        assert_raises(Volcano::Error::LockLostError) { guard.check! }
        @clock.jump(-3)
        assert_predicate(guard, :lost?)
      end
    end

    assert_match(/not renewed in time/, error.message)
    assert_equal(%w[acquire release], @server.operations)
  end

  def test_on_lost_is_called_once_on_another_thread_and_what_it_raises_is_only_logged
    calls = Queue.new
    assert_raises(Volcano::Error::LockLostError) do
      @locks.with_lock("k", ttl: 5) do |guard|
        assert_same(guard, guard.on_lost { |loss| calls << [loss, Thread.current] })
        guard.on_lost { raise "not nice" }
        guard.on_lost { |loss| calls << [loss, Thread.current] }
        @clock.jump(5)
        3.times { guard.lost? }
        first, second = calls.pop, calls.pop
        guard.on_lost { |loss| calls << [loss, Thread.current] }
        late = calls.pop

        [first, second, late].each do |loss, thread|
          assert_instance_of(Volcano::Error::LockLostError, loss)
          refute_same(Thread.current, thread)
        end
      end
    end

    assert_empty(calls)
  end

  def test_on_lost_wants_a_block
    assert_raises(ArgumentError) { @locks.with_lock("k", ttl: 5, &:on_lost) }
  end

  def test_a_slow_on_lost_block_keeps_no_renewal_from_its_work
    go = Queue.new
    started = Queue.new
    20.times { |number| hold("slow#{number}", ttl: 5) { |guard| guard.on_lost { [started << 1, go.pop] } } }
    hold("quick", ttl: 900)
    @clock.advance(0)
    @script = lambda do |request|
      next request.refuse(404, "not_found") if request.operation == "renew_many"

      request.key == "quick" ? request.grant : request.refuse(409, "lock_ownership_lost")
    end

    @clock.advance(2)
    3.times { started.pop }
    wait_until { @server.operations.count("renew") == 20 && @holders.all? { |holder| holder.status == "sleep" } }
    sleep(0.1)
    assert_empty(started, "more than three workers call on_lost blocks")
    @clock.advance(330)

    wait_until { @server.requests.any? { |request| request.operation == "renew" && request.key == "quick" } }
    20.times { go << 1 }
  end

  # Seven renewals that hang are all workers; they have 40 s left, the eighth lock has 2.
  def test_renewals_that_hang_and_have_time_give_way_to_one_that_has_not
    9.times { |number| hold("slack#{number}", ttl: 60) }
    @script = lambda do |request|
      next request.refuse(404, "not_found") if request.operation == "renew_many"

      request.key.start_with?("slack") && request.operation == "renew" ? request.hang : request.be_good
    end
    @clock.advance(25)
    wait_until { @server.requests.count { |request| request.operation == "renew" } == 7 }

    @locks.with_lock("urgent", ttl: 5) do |guard|
      @clock.advance(1.9)
      wait_until { @server.requests.any? { |request| request.operation == "renew" && request.key == "urgent" } }
      wait_until { @clock.timers.size >= 9 }
      @clock.advance(1)
      refute_predicate(guard, :lost?)
    end
  end

  def test_after_the_end_nobody_is_told_of_a_loss
    calls = []
    kept = nil
    @locks.with_lock("k", ttl: 5) { |guard| [kept = guard, guard.on_lost { calls << 1 }] }

    @clock.advance(100)

    refute_predicate(kept, :lost?)
    refute(kept.wait_lost)
    assert_nil(kept.check!)
    assert_empty(calls)
    assert_empty(@clock.timers)
  end

  def test_wait_lost_ends_with_the_loss_the_time_or_the_block
    @locks.with_lock("k", ttl: 30) do |guard|
      waiting = Thread.new { guard.wait_lost(timeout: 2) }
      wait_until { waiting.status == "sleep" && @clock.timers.size == 3 }
      @clock.advance(2)
      assert_equal(false, waiting.value)

      for_ever = Thread.new { guard.wait_lost }
      wait_until { for_ever.status == "sleep" }
      @waiting = for_ever
    end
    assert_equal(false, @waiting.value)

    assert_raises(Volcano::Error::LockLostError) do
      @locks.with_lock("k", ttl: 30) do |guard|
        waiting = Thread.new { guard.wait_lost }
        wait_until { waiting.status == "sleep" }
        @clock.jump(100)
        @clock.advance(0)
        assert_equal(true, waiting.value)
      end
    end
  end

  def test_a_waiting_thread_can_be_interrupted
    assert_raises(Timeout::Error) do
      @locks.with_lock("k", ttl: 30) { |guard| Timeout.timeout(0.05) { guard.wait_lost } }
    end
    assert_equal(%w[acquire release], @server.operations)
  end

  def test_the_lease_of_a_guard_is_that_of_its_latest_renewal
    @locks.with_lock("k", ttl: 30) do |guard|
      before = guard.lease
      @clock.advance(12)
      wait_until { !guard.lease.equal?(before) }

      assert_equal(before, guard.lease)
      assert_predicate(guard.lease, :frozen?)
    end
  end

  def test_a_ttl_of_ninety_days_makes_no_timer_overflow_and_no_early_renewal
    @locks.with_lock("k", ttl: 7_776_000) do
      @clock.advance(3600)
      assert_equal(%w[acquire], @server.operations)
      assert_in_delta(7_776_000 / 3, @clock.timers.map(&:at).min - 1000, 260_000)
    end
  end

  # Whoever shares a token shares its TTL: docs/semantics.md#local-deadline.
  def test_a_shorter_ttl_that_was_sent_before_counts_too
    @locks.acquire("k", ttl: 5, token: TOKEN)
    assert_raises(Volcano::Error::LockLostError) do
      @locks.with_lock("k", ttl: 30, token: TOKEN) { |guard| [@clock.jump(4.1), guard.check!] }
    end
    @locks.with_lock("k", ttl: 30) { |guard| [@clock.jump(4.1), guard.check!] }
  end

  def test_one_lost_lock_of_a_client_does_not_trouble_its_next
    assert_raises(Volcano::Error::LockLostError) { @locks.with_lock("k", ttl: 5) { @clock.jump(9) } }

    @locks.with_lock("k", ttl: 5) do |guard|
      @clock.advance(2)
      wait_until { @server.operations.last == "renew" }
      refute_predicate(guard, :lost?)
    end
  end

  private

  # Holds a lock on a thread of its own until the test is over.
  def hold(key, ttl:)
    entered = Queue.new
    thread = Thread.new do
      Thread.current.report_on_exception = false
      @locks.with_lock(key, ttl: ttl) { |guard| [yield_to(guard) { |one| yield one if block_given? }, entered << 1, sleep] }
    end
    (@holders ||= []) << thread
    entered.pop
  end

  def yield_to(guard)
    yield guard
  end
end

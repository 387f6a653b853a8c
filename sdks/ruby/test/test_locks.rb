# frozen_string_literal: true

require "test_helper"
require "logger"
require "stringio"

# What Ruby alone has to get right; what every SDK must do is in conformance/scenarios.
class TestLocks < VolcanoTest
  class Mine < StandardError; end

  def setup
    @script = :be_good.to_proc
    @server = ScriptedServer.open { |request| @script.call(request) }
    @log = StringIO.new
    @client = client(@server.url, logger: Logger.new(@log))
    @locks = @client.locks
  end

  def teardown
    super
    @server.close
  end

  # --- every way out of the block ------------------------------------------------------------------

  def leave_by_next
    @locks.with_lock("k", ttl: 5) { next 7 }
  end

  def leave_by_break
    @locks.with_lock("k", ttl: 5) { break 7 }
  end

  def leave_by_return
    @locks.with_lock("k", ttl: 5) { return 7 }
  end

  def leave_by_throw
    catch(:out) { @locks.with_lock("k", ttl: 5) { throw(:out, 7) } }
  end

  def leave_by_raise
    @locks.with_lock("k", ttl: 5) { raise Mine }
  rescue Mine
    7
  end

  def leave_by_exit
    @locks.with_lock("k", ttl: 5) { exit(7) }
  rescue SystemExit => error
    error.status
  end

  def leave_by_stop_iteration
    loop { @locks.with_lock("k", ttl: 5) { raise StopIteration } }
    7
  end

  def leave_by_timeout
    Timeout.timeout(0.3) { @locks.with_lock("k", ttl: 5) { sleep } }
  rescue Timeout::Error
    7
  end

  def leave_by_timeout_of_a_class
    Timeout.timeout(0.3, Mine) { @locks.with_lock("k", ttl: 5) { sleep } }
  rescue Mine
    7
  end

  def leave_by_thread_raise
    thread = Thread.new { [Thread.current.report_on_exception = false, @locks.with_lock("k", ttl: 5) { sleep }] }
    wait_until { @server.operations.any? && thread.status == "sleep" }
    thread.raise(Mine)
    assert_raises(Mine) { thread.value }
    7
  end

  def leave_by_kill
    thread = Thread.new { @locks.with_lock("k", ttl: 5) { sleep } }
    wait_until { @server.operations.any? && thread.status == "sleep" }
    thread.kill.join
    7
  end

  def leave_by_closing_an_enumerator
    enumerator = Enumerator.new { |out| @locks.with_lock("k", ttl: 5) { out << 7 } }
    enumerator.first
  end

  WAYS = instance_methods(false).grep(/\Aleave_by_/).freeze

  WAYS.each do |way|
    define_method("test_the_lock_is_released_when_its_block_is_left_#{way.to_s.delete_prefix("leave_")}") do
      assert_equal(7, send(way))
      assert_equal(%w[acquire release], @server.operations)
      assert_equal(*@server.requests.map { |request| request.headers["x-volcano-lock-token"] })
    end

    define_method("test_a_lost_lock_is_not_passed_over_when_its_block_is_left_#{way.to_s.delete_prefix("leave_")}") do
      @script = ->(request) { request.operation == "release" ? request.refuse(409, "lock_ownership_lost") : request.be_good }
      begin
        send(way)
        # These carry an error of their own, which goes up, or end the thread.
        assert_includes(%i[leave_by_raise leave_by_exit leave_by_stop_iteration leave_by_timeout_of_a_class leave_by_thread_raise leave_by_kill], way) unless
          way == :leave_by_timeout && Gem::Version.new(Timeout::VERSION) >= Gem::Version.new("0.3")
      rescue Volcano::Error::LockLostError => error
        assert_instance_of(Volcano::Error::ConflictError, error.cause)
        assert_includes(%i[leave_by_next leave_by_break leave_by_return leave_by_throw leave_by_timeout leave_by_closing_an_enumerator], way)
      end
    end
  end

  # --- errors beside errors ------------------------------------------------------------------------

  def test_the_blocks_error_goes_up_with_the_loss_at_the_end_of_its_causes
    @script = ->(request) { request.operation == "release" ? request.refuse(409, "lock_ownership_lost") : request.be_good }
    root = KeyError.new("root")

    error = assert_raises(Mine) { @locks.with_lock("k", ttl: 5) { raise Mine.new("mine"), cause: root } }

    assert_equal([Mine, KeyError, Volcano::Error::LockLostError, Volcano::Error::ConflictError], Volcano::Error.chain(error).map(&:class))
  end

  def test_the_blocks_error_goes_up_with_the_failed_release_beside_it
    @script = ->(request) { request.operation == "release" ? request.answer(500) : request.be_good }

    error = assert_raises(Mine) { @locks.with_lock("k", ttl: 5) { raise Mine } }

    assert_equal([Mine, Volcano::Error::ServerError], Volcano::Error.chain(error).map(&:class))
    assert_equal(%w[acquire release release], @server.operations)
  end

  def test_a_failed_release_does_not_spoil_the_blocks_value
    @script = ->(request) { request.operation == "release" ? request.answer(500) : request.be_good }

    assert_equal(7, @locks.with_lock("k", ttl: 5) { 7 })
    assert_match(/may stay taken for 5 s/, @log.string)
  end

  # In a `rescue`, `$!` is an older error, and nothing of the block's.
  def test_a_loss_is_told_whatever_error_was_being_handled_before
    @script = ->(request) { request.operation == "release" ? request.refuse(409, "lock_ownership_lost") : request.be_good }

    lost = begin
      raise "an older error"
    rescue RuntimeError
      assert_raises(Volcano::Error::LockLostError) { @locks.with_lock("k", ttl: 5) { :fine } }
    end

    assert_instance_of(Volcano::Error::ConflictError, lost.cause)
  end

  def test_an_older_error_does_not_get_our_errors_for_causes
    @script = ->(request) { request.operation == "release" ? request.answer(500) : request.be_good }
    older = RuntimeError.new("older")
    begin
      raise older
    rescue RuntimeError
      assert_equal(7, @locks.with_lock("k", ttl: 5) { 7 })
    end

    assert_nil(older.cause)
  end

  def test_check_in_the_block_raises_one_loss_not_two
    @script = ->(request) { request.operation == "renew" ? request.refuse(409, "lock_ownership_lost") : request.be_good }

    error = assert_raises(Volcano::Error::LockLostError) do
      @locks.with_lock("k", ttl: 5) { |guard| [guard.wait_lost(timeout: 5), guard.check!] }
    end

    assert_equal([Volcano::Error::LockLostError, Volcano::Error::ConflictError], Volcano::Error.chain(error).map(&:class))
    assert_match(/test_locks.rb/, error.backtrace.grep_v(/lib.volcano|rbs/).first)
    assert_equal(%w[acquire renew release], @server.operations)
  end

  # --- arguments -----------------------------------------------------------------------------------

  def test_wrong_arguments_are_refused_before_anything_is_sent
    lease = Volcano::LockLease.new(key: "k", token: TOKEN, expires_at: Time.now, fencing_token: 1)
    [
      -> { @locks.with_lock("k", ttl: 5) }, -> { @locks.acquire("k\n", ttl: 5) }, -> { @locks.acquire("k", ttl: 4) }, -> { @locks.acquire("k") },
      -> { @locks.acquire("k", ttl: 5, token: "x") }, -> { @locks.acquire("k", ttl: 5, request_id: "x") }, -> { @locks.acquire("k", 5) },
      -> { @locks.renew("j", lease, ttl: 5) }, -> { @locks.release("j", lease) }, -> { @locks.renew("k", lease, ttl: 5.0) },
      -> { @locks.renew("k", nil, ttl: 5) }, -> { @locks.get("a/b") }, -> { @locks.force_release("..") }, -> { @locks.get("k", request_id: 5) }
    ].each { |call| assert_raises(ArgumentError, &call) }

    assert_empty(@server.requests)
  end

  def test_a_token_that_was_released_is_not_used_again
    lease = @locks.acquire("k", ttl: 5, token: TOKEN)
    @locks.acquire("k", ttl: 5, token: TOKEN)
    @locks.release("k", lease)

    error = assert_raises(ArgumentError) { @locks.acquire("k", ttl: 5, token: TOKEN.upcase) }

    assert_match(/make a new one/, error.message)
    refute_match(/#{TOKEN}/, error.message)
    assert_raises(ArgumentError) { @locks.with_lock("k", ttl: 5, token: TOKEN) { flunk } }
    assert_equal(%w[acquire acquire release], @server.operations)
  end

  def test_what_is_remembered_of_spent_tokens_is_bounded
    10_001.times { @locks.send(:spend, SecureRandom.uuid) }

    assert_equal(10_000, @locks.instance_variable_get(:@spent).size)
  end

  # --- threads -------------------------------------------------------------------------------------

  def test_a_lock_that_cannot_be_renewed_for_want_of_threads_is_given_back
    Volcano::Shield.stub(:thread, ->(_name) { raise ThreadError, "can't create Thread: Resource temporarily unavailable" }) do
      error = assert_raises(Volcano::Error) { @locks.with_lock("k", ttl: 5) { flunk } }

      assert_instance_of(ThreadError, error.cause)
      assert_match(/given back/, error.message)
    end
    assert_equal(%w[acquire release], @server.operations)
    assert_equal(7, @locks.with_lock("k", ttl: 5) { 7 })
  end

  def test_a_lock_inside_a_lock_and_the_same_key_after_a_loss
    assert_equal(7, @locks.with_lock("a", ttl: 5) { @locks.with_lock("b", ttl: 5) { 7 } })
    assert_equal(%w[a b b a], @server.requests.map(&:key))
  end

  def test_with_locks_that_share_a_token_end_together
    entered = Queue.new
    other = Thread.new do
      assert_raises(Volcano::Error::LockLostError) { @locks.with_lock("k", ttl: 30, token: TOKEN) { |guard| [entered << 1, guard.wait_lost(timeout: 5)] } }
    end
    entered.pop

    @locks.with_lock("k", ttl: 30, token: TOKEN) { nil }

    assert_match(/released by another with_lock/, other.value.message)
  end

  def test_a_body_that_ends_while_a_renewal_hangs_ends_at_once
    @script = ->(request) { request.operation == "renew" ? request.hang : request.be_good }
    took = nil
    @locks.with_lock("k", ttl: 5) do
      wait_until(4) { @server.operations.include?("renew") }
      took = Process.clock_gettime(Process::CLOCK_MONOTONIC)
    end
    assert_operator(Process.clock_gettime(Process::CLOCK_MONOTONIC) - took, :<, 0.5)
    assert_equal(%w[acquire renew release], @server.operations)
  end
end

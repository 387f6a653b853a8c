# frozen_string_literal: true

require "test_helper"
require "logger"
require "minitest/mock"
require "rbconfig"
require "stringio"

# What waiting is made of in Ruby: threads, sockets, interrupts, forks. How it waits is in conformance/scenarios/waiting.
class TestWaitingRoom < VolcanoTest
  class Mine < StandardError; end

  # A lock server whose keys are held until `free` says otherwise.
  def setup
    @clock = ManualClock.new
    @free = []
    @expires_at = "2026-11-29T12:00:00Z"
    @on_watch = :open_stream.to_proc
    @server = ScriptedServer.open { |request| serve(request) }
    @log = StringIO.new
    @client = client(@server.url, clock: @clock, logger: Logger.new(@log))
    @locks = @client.locks
    @before = Thread.list
  end

  def teardown
    super
    @server.close
  end

  # --- one stream ----------------------------------------------------------------------------------

  def test_without_wait_a_held_key_costs_one_request_and_nothing_else
    [{}, { wait: 0 }, { wait: 0.0 }].each { |options| assert_raises(Volcano::Error::ConflictError) { @locks.acquire("k", ttl: 5, **options) } }

    assert_equal([%w[acquire] * 3, [], []], [@server.operations, @clock.timers, sdk_threads])
  end

  def test_twenty_calls_share_one_stream_and_one_thread
    waiting = Array.new(20) { |number| wait_for("k#{number % 4}") }
    wait_until { @server.streams.size == 1 && @server.streams.first.filters["key"] == %w[k0 k1 k2 k3] && at_rest(waiting) }

    wait_until { sdk_threads.map(&:name) == ["volcano events"] } # those of earlier streams may be on their way out
    wait_until { [free("k0", "k1", "k2", "k3"), waiting.none?(&:alive?)].last }
    waiting.each(&:value)
    assert_nothing_left
  end

  # --- one try -------------------------------------------------------------------------------------

  def test_of_twenty_that_wait_for_a_key_one_tries_at_a_time
    waiting = twenty
    tries = @server.operations.count("acquire")

    @free << "k"
    20.times do |number|
      @server.streams.first.tell("released")
      wait_until { waiting.count(&:alive?) == 19 - number && at_rest(waiting.select(&:alive?)) }
      assert_equal(tries + number + 1, @server.operations.count("acquire"))
    end
    assert_nothing_left
  end

  def test_a_refusal_is_one_for_all
    waiting = twenty
    tries = @server.operations.count("acquire")

    3.times do |number|
      @server.streams.first.tell("released")
      wait_until { @server.operations.count("acquire") == tries + number + 1 && at_rest(waiting) }
    end
    wait_until { [free("k"), waiting.none?(&:alive?)].last }
  end

  def test_when_the_one_that_tries_is_gone_the_next_one_does
    waiting = twenty
    tries = @server.operations.count("acquire")
    @on_acquire = ->(request) { @server.operations.count("acquire") == tries + 1 ? request.hang : request.grant }
    @server.streams.first.tell("released")
    exchange = wait_until { @client.session.transport.exchanges.find(&:at_rest?) }

    exchange.thread.kill
    wait_until { exchange.seconds == Volcano::Operations::EXIT_TRY_SECONDS }
    @clock.jump(2.1)

    wait_until { waiting.count(&:alive?) == 18 && at_rest(waiting.select(&:alive?)) }
    assert_equal([tries + 2, 1], [@server.operations.count("acquire"), @server.operations.count("release")])
    wait_until { [free("k"), waiting.none?(&:alive?)].last }
    assert_nothing_left
  end

  # One whose try hangs may hang for long.
  def test_what_happens_while_a_try_hangs_is_another_ones_affair
    waiting = twenty
    @on_acquire = lambda do |request|
      @on_acquire = nil
      request.hang
    end
    @server.streams.first.tell("released")
    wait_until { @client.session.transport.exchanges.any?(&:at_rest?) }

    @free << "k"
    @server.streams.first.tell("released")

    wait_until { waiting.count(&:alive?) == 19 }
    wait_until { [free("k"), waiting.count(&:alive?) == 1].last }
    @clock.jump(10)
    wait_until { waiting.none?(&:alive?) }
  end

  # Nobody knows whether the server had decided on the try before it told of the release.
  def test_what_happens_during_a_try_is_worth_another
    waiting = [wait_for("k"), wait_for("k")]
    wait_until { at_rest(waiting) && @server.streams.size == 1 && @server.operations.count("acquire") >= 3 }
    tries = @server.operations.count("acquire")
    @on_acquire = lambda do |request|
      @on_acquire = nil
      free("k")
      request.refuse(409, "lock_held")
    end

    @server.streams.first.tell("released")

    wait_until { waiting.one?(&:alive?) && at_rest(waiting.select(&:alive?)) }
    assert_includes(2..3, @server.operations.count("acquire") - tries)
    free("k")
    waiting.each(&:value)
  end

  # In between, nothing is heard twice and nothing is missed.
  def test_a_further_key_opens_a_stream_for_both_before_the_first_is_closed
    first = wait_for("a")
    wait_until { at_rest([first]) && @server.streams.size == 1 }
    a_stream = @server.streams.first
    @on_watch = ->(request) { [@opens_late = request, a_stream.socket.closed? ? flunk : request.open_stream] }

    second = wait_for("b")
    wait_until { at_rest([first, second]) && @server.streams == [@opens_late] }

    assert_equal([{ "key" => %w[a], "prefix" => [] }, { "key" => %w[a b], "prefix" => [] }], @server.requests.select { |one| one.operation == "watch" }.map(&:filters))
    assert_equal(%w[a a b b], keys_of("acquire"), "the first has no reason to try again")
    assert_nil(@opens_late.headers["last-event-id"])
    free("a", "b")
    assert_equal(%w[a b], [first, second].map { |one| one.value.key })
  end

  # What the old stream had told when the new one opened counts, too.
  def test_an_event_on_the_old_stream_is_not_lost_in_the_exchange
    first = wait_for("a")
    wait_until { at_rest([first]) && @server.streams.size == 1 }
    a_stream = @server.streams.first
    @on_watch = lambda do |request|
      @free << "a"
      a_stream.tell("released", "a") # and no word of it on the new one
      request.open_stream
    end

    second = wait_for("b")

    assert_equal("a", first.value.key)
    free("b")
    second.value
  end

  # A proxy that hangs up as soon as the client half does, or a server that is behind the other one.
  def test_an_event_that_the_old_stream_did_not_bring_any_more_is_made_good_by_one_look
    first = wait_for("a")
    wait_until { at_rest([first]) && @server.streams.size == 1 }
    second = wait_for("b")
    wait_until { at_rest([first, second]) && @server.streams.map { |stream| stream.filters["key"] } == [%w[a b]] }
    @clock.advance(5)
    wait_until { at_rest([first, second]) && keys_of("get") == %w[a] }
    @clock.advance(20)
    wait_until { at_rest([first, second]) }
    assert_equal(%w[a], keys_of("get"))

    third = wait_for("c")
    wait_until { at_rest([first, second, third]) && @server.streams.map { |stream| stream.filters["key"] } == [%w[a b c]] }
    @free << "a"
    @clock.advance(5)

    assert_equal("a", first.value.key)
    free("b", "c")
    [second, third].each(&:value)
    assert_nothing_left
  end

  def test_a_key_that_is_covered_by_prefixes_needs_no_further_stream
    waiting = Array.new(65) { |number| wait_for(format("job-%02d", number)) }
    wait_until { at_rest(waiting) && @server.streams.any? { |stream| stream.filters["prefix"].size == 7 } }
    streams = @server.operations.count("watch")

    waiting << wait_for("job-66")
    wait_until { at_rest(waiting) && keys_of("acquire").count("job-66") == 2 }

    assert_equal(streams, @server.operations.count("watch"))
    free(*keys_of("acquire").uniq)
    waiting.each(&:value)
    assert_nothing_left
  end

  def test_the_last_that_leaves_closes_the_stream
    waiting = [wait_for("k"), wait_for("k", wait: 10)]
    wait_until { at_rest(waiting) && @server.streams.size == 1 }

    @clock.advance(10)

    assert_raises(Volcano::Error::ConflictError) { waiting.last.value }
    assert_equal(1, @server.streams.size)
    free("k")
    waiting.first.value
    assert_nothing_left
  end

  def test_a_stream_that_cannot_have_a_thread_is_polled_for
    Volcano::Shield.stub(:thread, ->(_name) { raise ThreadError, "no more" }) do
      waiting = wait_for("k")
      wait_until { at_rest([waiting]) }
      @free << "k"

      advance_until { !waiting.alive? }

      assert_equal("k", waiting.value.key)
    end
    assert_match(/a thread for events could not be started: no more/, @log.string)
    assert_equal(0, @server.operations.count("watch"))
  end

  # --- without events ------------------------------------------------------------------------------

  def test_a_server_without_events_is_asked_once_and_polled_for_all_that_wait_for_a_key
    @on_watch = ->(request) { request.refuse(404, "not_found") }
    waiting = Array.new(20) { wait_for("k") }
    wait_until { at_rest(waiting) && @server.operations.include?("watch") && sdk_threads.empty? }

    100.times { [@clock.advance(0.1), wait_until { at_rest(waiting) }] }
    assert_includes(3..11, @server.operations.count("get"))
    free("k")
    advance_until { waiting.none?(&:alive?) }

    assert_equal(["k"] * 20, waiting.map { |one| one.value.key })
    assert_equal(1, @server.operations.count("watch"))
    assert_nothing_left
  end

  def test_when_it_is_time_for_all_to_read_the_key_one_does
    @on_watch = ->(request) { request.refuse(404, "not_found") }
    waiting = Array.new(20) { wait_for("k") }
    wait_until { at_rest(waiting) && @server.operations.include?("watch") && sdk_threads.empty? }
    @on_get = :hang.to_proc

    @clock.advance(5)

    exchanges = []
    wait_until do
      exchanges = @client.session.transport.exchanges
      @server.operations.include?("get") && exchanges.all?(&:at_rest?) && (Thread.list - [Thread.current]).none? { |thread| thread.status == "run" }
    end
    assert_equal([1, 1], [exchanges.size, @server.operations.count("get")])
    @on_get = nil
    free("k")
    advance_until { waiting.none?(&:alive?) }
    assert_nothing_left
  end

  # The server's clock is behind ours, and its key is held by whoever renews no more.
  def test_a_lease_that_is_over_by_our_clock_alone_is_read_at_ease_also_for_those_that_come_later
    @on_watch = ->(request) { request.refuse(404, "not_found") }
    @expires_at = Time.at(@clock.wall + 1).utc.xmlschema
    waiting = []

    100.times do |tenth|
      waiting << wait_for("k") if (tenth % 10).zero?
      @clock.advance(0.1)
      wait_until { at_rest(waiting) }
    end

    assert_includes(2..11, @server.operations.count("get"))
    free("k")
    advance_until { waiting.none?(&:alive?) }
    assert_nothing_left
  end

  # The open stream told of it, and the next one does not.
  def test_a_key_that_comes_again_while_a_stream_without_it_is_opened_is_read_meanwhile
    first = wait_for("a")
    wait_for("b")
    wait_until { at_rest([first]) && @server.streams.any? { |stream| stream.filters["key"] == %w[a b] } && sdk_threads.size == 1 }
    asked = []
    go = Queue.new
    @on_watch = ->(request) { [asked << request, go.pop, request.open_stream] }
    first.kill.join
    wait_for("c")
    wait_until { asked.size == 1 }
    tries = @server.operations.count("acquire")
    again = wait_for("a")
    wait_until { @server.operations.count("acquire") == tries + 2 && again.status == "sleep" }
    @free << "a"
    go << true
    wait_until { asked.size == 2 } # that one hangs
    @clock.advance(5)

    wait_until { !again.alive? }
    assert_equal("a", again.value.key)
    go << true
  end

  def test_a_read_has_what_is_left_of_the_wait_and_broken_off_says_nothing
    @on_watch = ->(request) { request.refuse(404, "not_found") }
    @on_get = :hang.to_proc
    waiting = wait_for("k", wait: 6)
    wait_until { at_rest([waiting]) && sdk_threads.empty? }
    @clock.advance(5.5)
    wait_until { @server.operations.include?("get") }
    wait_until { @client.session.transport.exchanges.any?(&:at_rest?) }
    @clock.advance(0.5)

    assert_raises(Volcano::Error::ConflictError) { waiting.value }
  end

  def test_a_token_of_the_callers_that_was_released_meanwhile_is_not_used_again
    token = SecureRandom.uuid
    waiting = Thread.new do
      Thread.current.report_on_exception = false
      @locks.acquire("k", ttl: 5, token: token, wait: 60)
    end
    wait_until { at_rest([waiting]) && @server.streams.size == 1 }
    @locks.release("k", Volcano::LockLease.new(key: "k", token: token, expires_at: Time.at(0), fencing_token: 7))
    tries = @server.operations.count("acquire")
    free("k")

    assert_raises(Volcano::Error::ConflictError) { waiting.value }
    assert_equal(tries, @server.operations.count("acquire"))
  end

  def test_what_one_was_told_to_wait_for_counts_for_all
    waiting = Array.new(4) { wait_for("k") }
    wait_until { at_rest(waiting) && @server.streams.size == 1 && @server.operations.count("acquire") > 4 }
    tries = @server.operations.count("acquire")
    @on_acquire = ->(request) { request.refuse(429, "lock_rate_limited", Retry_After: 30) }
    @server.streams.first.tell("released")
    wait_until { @server.operations.count("acquire") > tries && at_rest(waiting) }
    3.times do |number|
      @server.streams.first.tell("released", id: 2 + number)
      @clock.advance(1)
      wait_until { at_rest(waiting) }
    end

    assert_equal(tries + 1, @server.operations.count("acquire"))
    @on_acquire = nil
    waiting << wait_for("k")
    wait_until { @server.operations.count("acquire") > tries + 1 && at_rest(waiting) }

    assert_equal(tries + 2, @server.operations.count("acquire"), "the first of who came meanwhile, and no second")
    free("k")
    advance_until { waiting.none?(&:alive?) }
    assert_nothing_left
  end

  # --- what passes, and what does not --------------------------------------------------------------

  FINAL = [301, 304, 308, 400, 401, 403, 404, 405, 407, 413, 451].freeze

  def test_a_later_try_that_is_answered_with_what_will_not_pass_is_the_last
    FINAL.each do |status|
      waiting = wait_for("k")
      wait_until { at_rest([waiting]) && @server.streams.size == 1 }
      @on_acquire = ->(request) { request.refuse(status, "no", Location: "/elsewhere") }
      tries = @server.operations.count("acquire")
      @server.streams.first.tell("released")

      assert_equal(status, assert_raises(Volcano::Error) { waiting.value }.status)
      assert_equal(tries + 1, @server.operations.count("acquire"))
      @on_acquire = nil
      assert_nothing_left
    end
  end

  def test_a_read_that_is_answered_with_what_will_not_pass_is_the_last
    @on_watch = ->(request) { request.refuse(404, "not_found") }
    FINAL.each do |status|
      waiting = wait_for("k")
      wait_until { at_rest([waiting]) && sdk_threads.empty? }
      @on_get = ->(request) { request.refuse(status, "no", Location: "/elsewhere") }
      @clock.advance(5)

      assert_equal(status, assert_raises(Volcano::Error) { waiting.value }.status)
    end
    assert_equal(FINAL.size, @server.operations.count("get"))
    assert_nothing_left
  end

  PASSING = {
    ->(request) { request.refuse(500, "no") } => Volcano::Error::ServerError,
    ->(request) { request.refuse(503, "no") } => Volcano::Error::ServerError,
    ->(request) { request.refuse(429, "no", Retry_After: 30) } => Volcano::Error::RateLimitedError,
    ->(request) { request.answer(200, "<html>") } => Volcano::Error::ServerError,
    ->(request) { request.socket.close } => Volcano::Error::TransportError
  }.freeze

  # Broken is not busy.
  def test_a_read_that_fails_and_may_do_better_is_what_the_wait_ends_with_where_it_was_the_last
    @on_watch = ->(request) { request.refuse(404, "not_found") }
    PASSING.each do |script, error|
      reads = @server.operations.count("get")
      waiting = Array.new(2) { wait_for("k", wait: 10) }
      wait_until { at_rest(waiting) && sdk_threads.empty? }
      @on_get = script
      @clock.advance(5)
      wait_until { @server.operations.count("get") > reads && at_rest(waiting) }

      @clock.advance(5)

      waiting.each { |one| assert_raises(error) { one.value } }
    end
    assert_nothing_left
  end

  def test_a_wait_that_heard_since_that_the_key_is_held_ends_with_that_whatever_failed_before
    @on_watch = ->(request) { request.refuse(404, "not_found") }
    failing = PASSING.keys.first
    { get: -> { @on_get = failing }, try: -> { @on_acquire = failing } }.each_value do |break_it|
      waiting = wait_for("k", wait: 60)
      wait_until { at_rest([waiting]) && sdk_threads.empty? }
      free("k")
      break_it.call
      before = @server.operations.size
      @clock.advance(5)
      wait_until { @server.operations.size > before && at_rest([waiting]) }
      @free.clear
      @on_get = @on_acquire = nil
      60.times { [@clock.advance(1), wait_until { !waiting.alive? || at_rest([waiting]) }] }

      assert_raises(Volcano::Error::ConflictError) { waiting.value }
    end
    assert_nothing_left
  end

  # --- interrupts ----------------------------------------------------------------------------------

  def test_whatever_ends_a_wait_leaves_nothing_behind
    ways = {
      raise: ->(thread) { thread.raise(Mine) }, kill: ->(thread) { thread.kill },
      io_error: ->(thread) { thread.raise(IOError, "mine") }, volcano: ->(thread) { thread.raise(Volcano::Error::TransportError, "mine") }
    }
    %i[acquire with_lock].each do |call|
      ways.each_value do |way|
        thread = Thread.new { [Thread.current.report_on_exception = false, @locks.public_send(call, "k", ttl: 5, wait: Float::INFINITY) { flunk }] }
        wait_until { at_rest([thread]) && @server.streams.size == 1 }
        way.call(thread)
        wait_until { !thread.alive? }
        assert_nothing_left
      end
    end
    assert_equal(0, @server.operations.count("release"))
  end

  def test_a_timeout_throw_or_error_from_beside_ends_a_wait
    client = client(@server.url)
    assert_raises(Timeout::Error) { Timeout.timeout(0.05) { client.locks.acquire("k", ttl: 5, wait: 60) } }
    assert_raises(Mine) { Timeout.timeout(0.05, Mine) { client.locks.with_lock("k", ttl: 5, wait: 60) { flunk } } }

    wait_until { @server.streams.empty? && (Thread.list - @before).none? { |thread| thread.name == "volcano events" } }
    assert_empty(client.session.waiting_room.instance_variable_get(:@waiters))
  end

  STEPS = 100

  # x goes over the whole of it: the first try, the stream's opening, the second try, the release of the holder, the third
  # try, the body, the own release.
  def test_a_timeout_at_any_moment_leaves_no_lease_behind
    waiting, holding = Array.new(2) { RealServer.client }
    whole = Array.new(9) { |number| seconds { handed_over(waiting, holding, "#{RealServer.key}#{number}", 60) } }.sort[4]
    ends = Hash.new(0)

    STEPS.times do |step|
      key = RealServer.key
      ends[handed_over(waiting, holding, key, 0.0001 + (step * whole * 1.3 / STEPS))] += 1

      refute_predicate(holding.locks.get(key), :held?, "after step #{step}")
      wait_until { waiting.session.transport.streams.empty? && waiting.session.transport.exchanges.empty? }
      assert_empty(waiting.session.waiting_room.instance_variable_get(:@waiters))
    end

    assert_operator(ends[:timeout], :>, STEPS / 10, ends)
    assert_operator(ends[:done], :>, 0, ends)
  ensure
    [waiting, holding].compact.each(&:close)
  end

  def test_sigint_in_mid_wait_ends_it_and_its_process
    program = IO.popen([{ "URL" => @server.url }, RbConfig.ruby, "-w", "-I", load_path, "-r", "volcano", "-e", <<~'RUBY'], err: File::NULL)
      client = Volcano::Client.new(api_url: ENV.fetch("URL"), service_key: "sk-x", proxy: nil)
      begin
        client.locks.with_lock("k", ttl: 60, wait: Float::INFINITY) { $stdout.puts("in") }
      ensure
        sleep(0.01) while client.session.transport.streams.any? || Thread.list.any? { |thread| thread.name == "volcano events" }
        $stdout.puts(client.session.waiting_room.instance_variable_get(:@waiters))
      end
    RUBY
    wait_until(10) { @server.streams.size == 1 && keys_of("acquire").size == 2 }

    Process.kill("INT", program.pid)

    assert_equal("{}\n", program.read)
    program.close
    assert_equal(Signal.list["INT"], $?.termsig)
    wait_until { @server.streams.empty? }
  end

  def test_the_end_of_the_main_thread_ends_the_process_with_calls_that_wait
    program = IO.popen([{ "URL" => @server.url }, RbConfig.ruby, "-w", "-I", load_path, "-r", "volcano", "-e", <<~'RUBY'], "r+", err: %i[child out])
      client = Volcano::Client.new(api_url: ENV.fetch("URL"), service_key: "sk-x", proxy: nil)
      Thread.new { client.locks.acquire("k", ttl: 60, wait: Float::INFINITY) }
      Thread.new { client.locks.watch(key: "k") { nil } }
      $stdin.gets
    RUBY
    wait_until(10) { @server.streams.size == 2 && keys_of("acquire").size == 2 }

    took = seconds { assert_equal("", program.tap(&:close_write).read) }

    assert_operator(took, :<, 3)
    program.close
    assert_predicate($?, :success?)
  end

  # --- closing, forks ------------------------------------------------------------------------------

  def test_a_close_ends_what_waits_with_the_error_of_a_closed_client
    waiting = [wait_for("k"), wait_for("j")]
    wait_until { at_rest(waiting) && @server.streams.size == 1 }

    @client.close

    waiting.each { |one| assert_equal("this client is closed", assert_raises(Volcano::Error) { one.value }.message) }
    assert_nothing_left
  end

  def test_a_close_in_the_middle_of_a_try_does_so_too
    first = wait_for("k")
    wait_until { at_rest([first]) }
    @on_acquire = :hang.to_proc
    @server.streams.first.tell("released", "k")
    wait_until { @server.operations.count("acquire") == 3 }

    @client.close

    assert_equal("this client is closed", assert_raises(Volcano::Error) { first.value }.message)
    assert_nothing_left
  end

  def test_a_fork_has_no_waiters_and_opens_its_own_stream
    waiting = wait_for("k")
    wait_until { at_rest([waiting]) && @server.streams.size == 1 }
    out, into = IO.pipe
    pid = fork do
      into.puts(@client.session.waiting_room.instance_variable_get(:@waiters).size)
      into.puts(@locks.acquire("j", ttl: 5, wait: 60).key)
    ensure
      into.close
      exit!(0)
    end
    into.close

    assert_equal("0\n", out.gets)
    wait_until { @server.streams.map { |stream| stream.filters["key"] } == [%w[k], %w[j]] }
    free("j")
    assert_equal("j\n", out.gets)
    Process.wait(pid)
    free("k")
    assert_equal("k", waiting.value.key)
    wait_until { @server.streams.empty? }
  end

  private

  def serve(request)
    case request.operation
    when "acquire"
      return @on_acquire.call(request) if @on_acquire

      @free.include?(request.key) ? request.grant : request.refuse(409, "lock_held")
    when "get"
      return @on_get.call(request) if @on_get

      request.answer(200, @free.include?(request.key) ? { held: false } : { held: true, expires_at: @expires_at, fencing_token: 7 })
    when "watch" then @on_watch.call(request)
    else request.be_good
    end
  end

  # Frees these keys and tells of it.
  def free(*keys)
    @free.concat(keys)
    @server.streams.each { |stream| keys.each { |key| stream.tell("released", key) } }
  end

  def wait_for(key, wait: Float::INFINITY)
    Thread.new do
      Thread.current.report_on_exception = false
      @locks.acquire(key, ttl: 5, wait: wait)
    end
  end

  # Have all of them had their second try, or are they waiting for the time to pass?
  def at_rest(threads)
    threads.all? { |thread| thread.status == "sleep" } && @client.session.transport.exchanges.empty? &&
      @client.session.transport.streams.all?(&:at_rest?) && Thread.list.count { |thread| thread.status == "run" } == 1
  end

  # Twenty that wait for the same key.
  def twenty
    Array.new(20) { wait_for("k") }.tap do |waiting|
      wait_until { at_rest(waiting) && @server.streams.size == 1 && @server.operations.count("acquire") > 20 }
    end
  end

  def advance_until
    wait_until do
      @clock.advance(0.1)
      yield
    end
  end

  def keys_of(operation)
    @server.requests.select { |request| request.operation == operation }.map(&:key).sort
  end

  def sdk_threads
    Thread.list.select { |thread| thread.name&.start_with?("volcano") } - @before
  end

  def assert_nothing_left
    wait_until { @server.streams.empty? && sdk_threads.empty? }
    assert_empty(@client.session.waiting_room.instance_variable_get(:@waiters)) unless @client.instance_variable_get(:@closed)
    assert_empty(@clock.timers)
  end

  # One waits for what another holds, for at most so long.
  def handed_over(waiting, holding, key, after)
    lease = holding.locks.acquire(key, ttl: 60)
    releasing = Thread.new { [sleep(0.02), holding.locks.release(key, lease)] }
    Timeout.timeout(after) { waiting.locks.with_lock(key, ttl: 60, wait: 60) { sleep(0.001) } }
    :done
  rescue Timeout::Error
    :timeout
  ensure
    releasing&.join
  end

  def load_path
    $LOADED_FEATURES.grep(%r{/volcano\.rb\z}).first.delete_suffix("/volcano.rb")
  end
end

# frozen_string_literal: true

require "test_helper"

# What watching is made of in Ruby. What it tells is in conformance/scenarios/watch.
class TestWatch < VolcanoTest
  class Mine < StandardError; end

  def setup
    @on_watch = ->(request) { request.open_stream }
    @server = ScriptedServer.open { |request| request.operation == "watch" ? @on_watch.call(request) : request.be_good }
    @client = client(@server.url)
    @locks = @client.locks
  end

  def teardown
    super
    @server.close
  end

  # --- the enumerator ------------------------------------------------------------------------------

  def test_nothing_is_sent_before_the_first_event_is_asked_for
    events = @locks.watch(key: "k")

    assert_instance_of(Enumerator, events)
    assert_nil(events.size)
    assert_empty(@server.requests)
    assert_match(/\A#<Enumerator: #<Volcano::Watch>:each>\z/, events.inspect)
  end

  def test_a_break_ends_it_and_its_connection_at_once
    @on_watch = ->(request) { [request.open_stream_head, request.tell("released"), request.tell("lapsed"), request.hang, request.socket.close] }

    assert_equal(:released, @locks.watch(key: "k") { |event| break event.type })
    assert_ended
    assert_equal(:released, @locks.watch(key: "k").each { |event| break event.type })
    assert_ended
    assert_equal(%i[released lapsed], @locks.watch(prefix: "k").first(2).map(&:type))
    assert_ended
    assert_equal([:lapsed], @locks.watch(key: "k").lazy.map(&:type).reject { |type| type == :released }.first(1))
    assert_ended
  end

  # Also errors that the network may have, and what `loop` takes for its end.
  def test_an_error_of_the_block_goes_up_and_ends_it
    @on_watch = ->(request) { [request.open_stream_head, request.tell("released"), request.hang, request.socket.close] }

    [Mine, IOError, EOFError, Errno::ECONNRESET, Net::ReadTimeout, StopIteration, Volcano::Error::TransportError].each do |error|
      assert_raises(error) { @locks.watch(key: "k") { raise error } }
      assert_ended
    end
    assert_equal(7, catch(:out) { @locks.watch(key: "k") { throw(:out, 7) } })
    assert_ended
  end

  def test_an_event_after_the_other_comes_from_next_without_a_thread
    events = @locks.watch(key: "k")
    before = Thread.list
    Thread.new { [wait_until { @server.streams.any? }, @server.streams.first.tell("acquired"), @server.streams.first.tell("released")] }

    assert_equal(%i[acquired released], Array.new(2) { events.next.type })
    assert_equal(1, @server.streams.size)
    assert_empty((Thread.list - before).select { |thread| thread.name&.start_with?("volcano") && thread.name != "volcano timers" })
    events.rewind
    assert_ended
  end

  def test_rewind_ends_what_next_began_also_below_other_enumerators
    @on_watch = ->(request) { [request.open_stream_head, request.tell("released"), request.hang, request.socket.close] }
    events = @locks.watch(key: "k").with_index

    assert_equal([:released, 0], events.next.then { |event, index| [event.type, index] })
    events.rewind
    assert_ended
    assert_equal([:released, 0], events.next.then { |event, index| [event.type, index] })
    assert_equal(1, @server.streams.size)
    events.rewind
    assert_ended
  end

  def test_rewind_ends_no_iteration_but_that
    @on_watch = ->(request) { [request.open_stream_head, request.tell("released"), request.hang, request.socket.close] }
    events = @locks.watch(key: "k")
    inner = Queue.new
    other = Thread.new { events.each { |event| [inner << event, inner.size > 1 && break] } }
    wait_until { inner.size == 1 }

    events.rewind

    @server.streams.first.tell("lapsed")
    other.join
    assert_equal(%i[released lapsed], Array.new(2) { inner.pop.type })
  end

  # Ruby runs no `ensure` of a fiber that is collected.
  def test_an_iteration_that_nobody_resumes_is_collected_with_its_socket
    @on_watch = ->(request) { [request.open_stream_head, request.tell("released"), request.hang, request.socket.close] }
    Thread.new { 10.times { @locks.watch(key: "k").next } }.join
    assert_includes(1..10, @server.streams.size)

    wait_until(10, "garbage collection") { [GC.start, Array.new(1000) { "x" }] && @server.streams.size <= 1 }

    assert_operator(@client.session.transport.streams.size, :<=, 1)
  end

  # --- interrupts ----------------------------------------------------------------------------------

  def test_an_interrupt_ends_it_wherever_it_waits
    [->(request) { request.open_stream }, ->(request) { request.hang }, ->(request) { request.refuse(503, "lock_service_unavailable", Retry_After: 60) }].each do |script|
      @on_watch = script
      sent = @server.requests.size
      watching = Thread.new { [Thread.current.report_on_exception = false, @locks.watch(key: "k") { flunk }] }
      wait_until { @server.requests.size > sent && watching.status == "sleep" }

      watching.raise(Mine)

      assert_raises(Mine) { watching.value }
      assert_ended
    end
  end

  def test_a_timeout_around_next_ends_the_iteration_and_the_next_one_begins_anew
    events = @locks.watch(key: "k")

    2.times do
      assert_raises(Timeout::Error) { Timeout.timeout(0.05) { events.next } }
      assert_ended
    end
    assert_equal(%w[watch watch], @server.operations)
  end

  def test_one_that_ended_before_it_told_anything_begins_anew_with_a_reset
    @on_watch = lambda do |request|
      request.open_stream_head
      request.tell("released", id: "") if @server.operations.size > 1
      @server.operations.size > 1 ? request.hang : request.socket.close
    end

    events = @locks.watch(key: "k")
    assert_equal(%i[reset released], Array.new(2) { events.next.type })
    events.rewind
    assert_ended
  end

  # --- errors --------------------------------------------------------------------------------------

  def test_a_server_without_events_is_not_found
    [404, 405].each do |status|
      @on_watch = ->(request) { request.refuse(status, "not_found") }

      error = assert_raises(Volcano::Error::NotFoundError) { @locks.watch(key: "k").next }
      assert_equal([status, "this server has no events"], [error.status, error.message])
    end
  end

  def test_what_will_not_pass_goes_up
    answers = { 400 => :ValidationError, 401 => :AuthenticationError, 403 => :PermissionDeniedError, 409 => :ConflictError, 413 => :ValidationError }
    [204, 301, 304, 308, 407, 451, *answers.keys].each do |status|
      @on_watch = ->(request) { request.refuse(status, "no", Location: "/elsewhere") }

      error = Timeout.timeout(5) { assert_raises(Volcano::Error) { @locks.watch(key: "k") { flunk } } }
      assert_equal([status, answers.key?(status) ? Volcano::Error.const_get(answers[status]) : Volcano::Error], [error.status, error.class])
      assert_ended
    end
    assert_equal(["watch"] * 11, @server.operations)
  end

  def test_what_passes_is_followed_by_another_stream
    [->(request) { request.refuse(500, "no") }, ->(request) { request.refuse(503, "no") }, ->(request) { request.refuse(429, "no") },
     ->(request) { request.answer(200, "<html>") }, ->(request) { request.socket.close }].each do |script|
      @on_watch = lambda do |request|
        @on_watch = ->(again) { [again.open_stream_head, again.tell("released"), again.hang, again.socket.close] }
        script.call(request)
      end

      assert_equal(:released, @locks.watch(key: "k") { |event| break event.type })
      assert_ended
    end
  end

  def test_wrong_filters_are_refused_at_once
    [{}, { key: "a/b" }, { prefix: ["a", 7] }, { key: ("a".."zz").first(65) }].each { |filters| assert_raises(ArgumentError) { @locks.watch(**filters) } }
    assert_raises(ArgumentError) { @locks.watch("k") }
    assert_empty(@server.requests)
  end

  # --- closing, forks ------------------------------------------------------------------------------

  def test_a_close_ends_it
    [->(request) { request.open_stream }, ->(request) { request.refuse(503, "lock_service_unavailable", Retry_After: 60) }].each do |script|
      @on_watch = script
      sent = @server.requests.size
      one = client(@server.url)
      watching = Thread.new { one.locks.watch(key: "k") { flunk } }
      wait_until { @server.requests.size > sent && watching.status == "sleep" }

      one.close

      assert_nil(watching.value)
      wait_until { @server.streams.empty? }
      assert_raises(Volcano::Error) { one.locks.watch(key: "k").next }
    end
  end

  def test_a_child_that_goes_on_iterating_opens_a_stream_of_its_own
    @on_watch = ->(request) { [request.open_stream_head, request.tell("released", id: @server.requests.size), request.hang, request.socket.close] }
    out, into = IO.pipe
    told = 0
    @locks.watch(key: "k") do |event|
      told += 1
      if told == 1 && (pid = fork)
        into.close
        assert_equal("released again\n", out.read)
        Process.wait(pid)
        assert_equal(1, @server.streams.size, "the parent's")
        break
      elsif told == 2
        into.puts("#{event.type} again")
        into.close
        exit!(0)
      end
    end
    assert_equal([nil, "1"], @server.requests.map { |request| request.headers["last-event-id"] })
    assert_ended
  end

  private

  def assert_ended
    wait_until { @server.streams.empty? && @client.session.transport.exchanges.empty? }
    assert_empty(@client.session.transport.streams)
  end
end

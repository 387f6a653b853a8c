# frozen_string_literal: true

require "test_helper"

class TestStream < VolcanoTest
  HEAD = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
  EVENT = %(event: released\nid: 42\ndata: {"key":"k","fencing_token":7,"at":"2026-12-01T00:00:00.123Z","watchers":1}\n\n)

  def setup
    @clock = ManualClock.new
  end

  def teardown
    @stream&.close
    super
    @server&.close
  end

  # --- what is sent --------------------------------------------------------------------------------

  def test_the_request_is_on_the_wire_as_the_protocol_says
    open(stream_of { |request| request.open_stream })

    request = @server.requests.first
    assert_equal(["GET", "/lock-events?key=a%3Ab&key=k&prefix=x"], [request.http_method, request.path])
    assert_equal(["text/event-stream", "Bearer sk-test", nil], request.headers.values_at("accept", "authorization", "last-event-id"))
    assert_match(/\A\h{8}-/, request.headers["x-volcano-request-id"])
  end

  def test_it_goes_on_behind_the_last_id
    open(stream_of(last_id: "41-é") { |request| request.open_stream })

    assert_equal("41-é".b, @server.requests.first.headers["last-event-id"].b)
    assert_equal("41-é", @stream.last_id)
  end

  # --- what comes ----------------------------------------------------------------------------------

  def test_events_come_as_they_are_told
    open(stream_of { |request| request.open_stream })

    assert_equal([], @stream.next_events)
    @server.streams.first.tell("released", id: 42)

    assert_equal([[:released, "k"]], @stream.next_events.map { |event| [event.type, event.key] })
    assert_equal(["42", 8 + EVENT.bytesize], [@stream.last_id, @stream.taken])
  end

  def test_it_is_no_exchange_in_flight_once_it_is_open
    open(stream_of { |request| request.open_stream })

    assert_equal([[], [@stream]], [@session.transport.exchanges, @session.transport.streams])
    @stream.close
    assert_equal([[], []], [@session.transport.exchanges, @session.transport.streams])
  end

  # Chunked, up to the length, up to the end of the connection; in one piece and byte by byte.
  def test_bodies_of_all_kinds_are_read
    chunks = "#{EVENT.bytesize.to_s(16)}\r\n#{EVENT}\r\n"
    { "Transfer-Encoding: chunked\r\n\r\n#{chunks}0\r\n\r\n" => 1, "Transfer-Encoding: chunked\r\n\r\n#{chunks}#{chunks}0\r\nTrailer: x\r\n\r\n" => 2,
      "Transfer-Encoding: chunked\r\n\r\n#{EVENT.bytesize.to_s(16)};name=value\r\n#{EVENT}\r\n0\r\n\r\n" => 1,
      "Content-Length: #{EVENT.bytesize}\r\n\r\n#{EVENT}" => 1, "Content-Length: 0\r\n\r\n" => 0, "\r\n#{EVENT}#{EVENT}" => 2, "\r\n" => 0 }.each do |rest, count|
      [->(socket, text) { socket.write(text) }, ->(socket, text) { text.each_char { |char| socket.write(char) } }].each do |write|
        open(stream_of { |request| [write.call(request.socket, HEAD + rest), request.socket.close] })

        assert_equal([:released] * count, all_events.map(&:type), rest)
        @stream.close
        @server.close
      end
    end
  end

  def test_what_is_no_chunk_or_ends_early_is_the_end
    ["zz\r\n", "\r\n", "5\r\nab", "ffffffffffff\r\nab", "-5\r\nab"].each do |junk|
      open(stream_of { |request| [request.socket.write("#{HEAD}Transfer-Encoding: chunked\r\n\r\n#{junk}"), request.socket.close] })

      assert_empty(all_events)
      @server.close
    end
  end

  def test_an_event_without_end_is_cut_off
    open(stream_of { |request| [request.socket.write("#{HEAD}\r\n"), 100.times { request.socket.write("data: #{"x" * 10_000}\n") }, request.hang] })

    assert_empty(all_events)
    assert_operator(@stream.taken, :<, 700_000)
  end

  def test_a_stream_may_be_as_long_as_it_likes
    open(stream_of { |request| [request.socket.write("#{HEAD}\r\n"), 100.times { request.socket.write(": #{"x" * 10_000}\n\n") }, request.socket.write(EVENT), request.socket.close] })

    assert_equal([:released], all_events.map(&:type))
    assert_operator(@stream.taken, :>, 1_000_000)
  end

  def test_a_reset_connection_is_the_end
    open(stream_of { |request| request.open_stream })
    @stream.next_events

    @server.requests.first.reset

    assert_nil(@stream.next_events)
  end

  # --- what stands in its way ----------------------------------------------------------------------

  def test_any_other_answer_is_the_outcome_and_its_connection_is_kept
    [[404, { error: "No.", code: "not_found" }], [200, { held: false }]].each do |status, body|
      stream = stream_of { |request| request.answer(status, body, Content_Type: "application/json") }

      outcome = stream.open
      stream.close
      @session.transport.call(Volcano::Operations::Try.new(request: stream.try.request, timeout: 5))

      assert_equal([status, [1, 1]], [outcome.status, @server.requests.map(&:connection)])
      @server.close
    end
  end

  def test_a_server_that_is_away_is_a_failure
    stream = stream_of { |request| request.reset }
    @server.close

    refute(stream.open.reached)
    stream.close
  end

  def test_a_head_that_does_not_come_is_given_up_with_the_timeout
    stream = stream_of { |request| request.hang }
    opening = Thread.new { stream.open }
    wait_until { @server.requests.any? && stream.at_rest? }

    @clock.jump(10)

    assert_match(/watch got no answer .* none within 10.0 s/, opening.value.error.message)
    stream.close
    wait_until { @server.open_connections.zero? }
  end

  # --- silence -------------------------------------------------------------------------------------

  def test_nothing_for_forty_seconds_is_the_end
    open(stream_of { |request| request.open_stream })
    @stream.next_events
    reading = Thread.new { @stream.next_events }
    wait_until { @stream.at_rest? }

    @clock.advance(39.9)
    assert_predicate(reading, :alive?)
    @clock.advance(0.1)

    assert_nil(reading.value)
    assert_empty(@clock.timers)
  end

  def test_a_comment_breaks_the_silence
    open(stream_of { |request| request.open_stream })
    @stream.next_events
    2.times do
      reading = Thread.new { @stream.next_events }
      wait_until { @stream.at_rest? }
      @clock.advance(39)
      @server.streams.first.chunk(": \n\n")
      assert_equal([], reading.value)
    end
    assert_empty(@clock.timers)
  end

  # --- ends ----------------------------------------------------------------------------------------

  def test_an_abort_ends_it
    open(stream_of { |request| request.open_stream })
    @stream.next_events
    reading = Thread.new { @stream.next_events }
    wait_until { @stream.at_rest? }

    @stream.abort

    assert_nil(reading.value)
  end

  # A socket that is shut down in both directions loses what comes later, and what came before with it.
  def test_what_a_server_tells_before_it_sees_the_retirement_is_heard
    open(stream_of { |request| [request.open_stream_head, request.hang, request.tell("released"), request.chunk(": \n\n"), request.tell("lapsed"), request.socket.close] })

    @stream.retire

    assert_equal(%i[released lapsed], all_events.map(&:type))
    @stream.close
    assert_empty(@clock.timers)
  end

  def test_a_server_that_does_not_see_the_retirement_is_left
    open(stream_of { |request| [request.open_stream_head, sleep] })
    reading = Thread.new { all_events }
    @stream.retire
    wait_until { @stream.at_rest? }

    @clock.advance(1)

    assert_empty(reading.value)
  end

  def test_an_interrupt_leaves_at_once_also_in_the_middle_of_a_chunk
    open(stream_of { |request| [request.socket.write("#{HEAD}Transfer-Encoding: chunked\r\n\r\n5\r\n:ab"), request.hang] })
    @stream.next_events
    reading = Thread.new { [Thread.current.report_on_exception = false, @stream.next_events] }
    wait_until { @stream.at_rest? }

    took = seconds do
      reading.raise(Interrupt)
      assert_raises(Interrupt) { reading.value }
    end

    assert_operator(took, :<, 1)
    @stream.close
    wait_until { @server.open_connections.zero? }
    assert_empty(@clock.timers)
  end

  private

  def stream_of(last_id: "", &script)
    @server = ScriptedServer.open(&script)
    @session = client(@server.url, clock: @clock).session
    filters = Volcano::Events::Filters.new(%w[k a:b], ["x"])
    request = Volcano::Operations.watch(filters, last_id: last_id, request_id: SecureRandom.uuid, service_key: "sk-test")
    Volcano::Stream.new(Volcano::Operations::Try.new(request: request, timeout: 10.0), transport: @session.transport, clock: @clock, last_id: last_id)
  end

  def open(stream)
    @stream = stream
    assert_nil(stream.open)
  end

  def all_events
    all = []
    while (events = @stream.next_events)
      all.concat(events)
    end
    all
  end
end

# frozen_string_literal: true

require "test_helper"
require "minitest/mock"

# Net::HTTP is given the requests and asked for the answers. HTTP/1.1 as servers and proxies speak it. That junk is no answer, and how streams are read: test_transport.rb, test_stream.rb.
class TestLane < VolcanoTest
  FREE = %({"held":false})
  LENGTH = "Content-Length: #{FREE.bytesize}\r\n"

  def teardown
    super
    @server&.close
  end

  # What an answer says of the connection, and whether the next request may travel on it.
  def test_answers_of_all_kinds_are_read_and_their_connection_used_again_or_not
    chunks = "5\r\n#{FREE[0, 5]}\r\n9;name=value \r\n#{FREE[5..]}\r\n0\r\n"
    { "HTTP/1.1 200 OK\r\n#{LENGTH}\r\n#{FREE}" => true, "HTTP/1.1 200\r\n#{LENGTH}\r\n#{FREE}" => true, "HTTP/1.1 200 OK\n#{LENGTH}\n#{FREE}" => true,
      "HTTP/1.1 200 OK\r\ncontent-LENGTH:\t#{FREE.bytesize} \r\nX-Empty:\r\nX: a\r\n folded: line\r\n\r\n#{FREE}" => true,
      "HTTP/1.1 200 OK\r\nTransfer-Encoding: Chunked\r\n\r\n#{chunks}\r\n" => true,
      "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Length: 30\r\n\r\n#{chunks}Trailer: x\r\nAnother: y\r\n\r\n" => true,
      "HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\nHTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\n#{LENGTH}\r\n#{FREE}" => true,
      "HTTP/1.0 200 OK\r\nConnection: Keep-Alive\r\n#{LENGTH}\r\n#{FREE}" => true, "HTTP/1.0 200 OK\r\n#{LENGTH}\r\n#{FREE}" => false,
      "HTTP/1.1 200 OK\r\nConnection: Close\r\nConnection: x\r\n#{LENGTH}\r\n#{FREE}" => false }.each do |text, kept|
      [->(socket) { socket.write(text) }, ->(socket) { text.each_char { |char| socket.write(char) } }].each do |write|
        locks = locks_of { |request| write.call(request.socket) }

        2.times { refute_predicate(locks.get("k"), :held?, text) }

        assert_equal([2, kept ? 1 : 2], [@server.requests.size, @server.connections], text)
        @server.close
      end
    end
  end

  def test_a_connection_that_says_more_than_its_answer_is_not_used_again
    locks = locks_of { |request| request.socket.write("HTTP/1.1 200 OK\r\n#{LENGTH}\r\n#{FREE}HTTP/1.1 200 OK\r\n") }

    2.times { refute_predicate(locks.get("k"), :held?) }

    assert_equal([2, 2], [@server.requests.size, @server.connections])
  end

  def test_a_body_may_end_with_its_connection
    locks = locks_of { |request| [request.socket.write("HTTP/1.1 200 OK\r\n\r\n#{FREE}"), request.socket.close] }

    2.times { refute_predicate(locks.get("k"), :held?) }
  end

  def test_answers_without_a_body_end_with_their_head
    ["204 No Content\r\n", "204 No Content\r\nContent-Length: 5\r\n", "204 No Content\r\nTransfer-Encoding: chunked\r\n"].each do |head|
      locks = locks_of { |request| request.socket.write("HTTP/1.1 #{head}\r\n") }

      2.times { assert_nil(locks.force_release("k")) }
      assert_equal(1, @server.connections)
      @server.close
    end
  end

  def test_what_could_be_read_in_two_ways_is_not_read
    ["Content-Length: 15\r\nContent-Length: 14\r\n", "Transfer-Encoding: chunked\r\n\r\ne\r\n#{FREE}x\r\n0\r\n", "Transfer-Encoding: gzip, chunked\r\n", "X" * 100_000].each do |fields|
      locks = locks_of { |request| [request.socket.write("HTTP/1.1 200 OK\r\n#{fields}\r\n#{FREE}"), request.socket.close] }

      assert_raises(Volcano::Error::TransportError, fields) { locks.get("k") }
      assert_equal(1, @server.requests.size)
      @server.close
    end
  end

  def test_what_does_not_fit_into_the_socket_waits_and_is_sent_whole
    body = "x" * 20_000_000
    locks_of { |request| request.be_good }

    assert_equal(204, send_body(body, timeout: 20.0).status)
    assert_equal(body, @server.requests.first.body)
  end

  # Also where the connection was opened by a call with more time.
  def test_what_nobody_reads_is_given_up_with_the_timeout
    TCPServer.open("127.0.0.1", 0) do |listener|
      @session = client("http://127.0.0.1:#{listener.addr[1]}").session
      server = Thread.new { listener.accept.tap { |socket| [socket.readpartial(10_000), socket.write("HTTP/1.1 204 No Content\r\n\r\n")] } }

      assert_equal(204, send_body("x", timeout: 20.0).status)
      took = seconds { assert_match(/none within 0.2 s/, send_body("x" * 20_000_000, timeout: 0.2).error.message) }

      assert_operator(took, :<, 5)
      server.value.close
    end
  end

  def test_an_answer_without_end_is_cut_off
    chunked = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    { "" => "HTTP/1.1 100 Continue\r\n\r\n" * 1_000, "#{chunked}0\r\n" => "a: b\r\n" * 3_000,
      chunked => "1;#{"x" * 60_000}\r\na\r\n" }.each do |head, more|
      @server = ScriptedServer.open do |request|
        request.socket.write(head)
        loop { request.socket.write(more) }
      rescue SystemCallError, IOError
        nil # the client hung up
      end

      error = assert_raises(Volcano::Error::TransportError) { client(@server.url, timeout: 10).locks.get("k") }

      assert_match(/longer than/, error.message)
      @server.close
    end
  end

  # --- Net::HTTP as others know it -----------------------------------------------------------------

  def test_what_watches_net_http_sees_each_request_and_may_add_to_it
    locks = locks_of { |request| request.be_good }
    seen = []
    watched = Class.new(Net::HTTP) do
      define_method(:request) do |request, *rest, &block|
        request["Traceparent"] = "00-1"
        super(request, *rest, &block).tap { |response| seen << [request.method, request.path, request["x-volcano-lock-token"], request.body, response.code] }
      end
    end

    Net::HTTP.stub(:new, watched.new("127.0.0.1", @server.port, nil)) { locks.acquire("k", ttl: 30, token: TOKEN) }

    assert_equal([["POST", "/locks/k/lease", TOKEN, %({"ttl_seconds":30}), "201"]], seen)
    assert_equal("00-1", @server.requests.first.headers["traceparent"])
  end

  # As WebMock does it. An event stream is no answer then.
  def test_a_double_may_answer_without_a_connection
    double = Class.new(Net::HTTP) do
      define_method(:start) { tap { @started = true } }
      define_method(:request) do |_request, &read|
        socket = Net::BufferedIO.new(StringIO.new("HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n#{LENGTH}\r\n#{FREE}"))
        Net::HTTPResponse.read_new(socket).tap { |response| response.reading_body(socket, true) { read.call(response) } }
      end
    end
    one = client("http://locks.example.invalid")
    request = Volcano::Operations.get("k", request_id: TOKEN, service_key: "sk-test")
    stream = Volcano::Stream.new(Volcano::Operations::Try.new(request: request, timeout: 5.0), transport: one.session.transport, clock: one.session.clock)
    place = ->(&call) { Net::HTTP.stub(:new, double.new("locks.example.invalid", 80, nil), &call) }

    2.times { place.call { refute_predicate(one.locks.get("k"), :held?) } }
    assert_equal([200, FREE], place.call { stream.open.to_h.values_at(:status, :body) })
    stream.close
  end

  private

  def send_body(body, timeout:)
    request = Volcano::Operations.release("k", token: TOKEN, request_id: TOKEN, service_key: "sk-test").to_h
    @session.transport.call(Volcano::Operations::Try.new(request: Volcano::Operations::Request.new(**request, body: body), timeout: timeout))
  end

  def locks_of(&script)
    @server = ScriptedServer.open(&script)
    one = client(@server.url, timeout: 5)
    @session = one.session
    one.locks
  end
end

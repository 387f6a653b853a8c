# frozen_string_literal: true

require "helper"

# HTTP/1.1 as servers and proxies speak it. That junk is no answer, and how streams are read: test_transport.rb, test_stream.rb.
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
      "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n#{chunks}Trailer: x\r\nAnother: y\r\n\r\n" => true,
      "HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\nHTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\n#{LENGTH}\r\n#{FREE}" => true,
      "HTTP/1.0 200 OK\r\nConnection: Keep-Alive\r\n#{LENGTH}\r\n#{FREE}" => true, "HTTP/1.0 200 OK\r\n#{LENGTH}\r\n#{FREE}" => false,
      "HTTP/1.1 200 OK\r\nConnection: Close\r\nConnection: x\r\n#{LENGTH}\r\n#{FREE}" => false,
      "HTTP/1.1 200 OK\r\n#{LENGTH}\r\n#{FREE}HTTP/1.1 200 OK\r\n" => false }.each do |text, kept|
      [->(socket) { socket.write(text) }, ->(socket) { text.each_char { |char| socket.write(char) } }].each do |write|
        locks = locks_of { |request| write.call(request.socket) }

        2.times { refute_predicate(locks.get("k"), :held?, text) }

        assert_equal([2, kept ? 1 : 2], [@server.requests.size, @server.connections], text)
        @server.close
      end
    end
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
    ["Content-Length: 15\r\nContent-Length: 14\r\n", "Transfer-Encoding: chunked\r\n\r\ne\r\n#{FREE}x\r\n0\r\n", "Content-Length: +14\r\n", "Content-Length: -1\r\n", "Transfer-Encoding: gzip, chunked\r\n",
     "Content-Length : 14\r\n", " Content-Length: 14\r\n", "X" * 100_000, "X: #{"x" * 100_000}\r\n"].each do |fields|
      locks = locks_of { |request| [request.socket.write("HTTP/1.1 200 OK\r\n#{fields}\r\n#{FREE}"), request.socket.close] }

      assert_raises(Volcano::Error::TransportError, fields) { locks.get("k") }
      assert_equal(1, @server.requests.size)
      @server.close
    end
  end

  def test_what_does_not_fit_into_the_socket_waits_and_is_sent_whole
    TCPServer.open("127.0.0.1", 0) do |listener|
      lane = Volcano::Lane.new(URI("http://127.0.0.1:#{listener.addr[1]}"), [nil])
      lane.open(5.0)
      accepted = listener.accept
      lane.use(patient = Patient.new(0))
      message = Random.bytes(20_000_000)
      writing = Thread.new { lane.write(message) }
      wait_until { patient.waits.positive? }

      assert_equal(message, accepted.read(message.bytesize))
      writing.value
      lane.close
      accepted.close
    end
  end

  # A proxy that finds a request too large says so and hangs up in the middle of it.
  def test_a_refusal_that_comes_before_the_request_was_read_is_an_answer
    TCPServer.open("127.0.0.1", 0) do |listener|
      lane = Volcano::Lane.new(URI("http://127.0.0.1:#{listener.addr[1]}"), [nil])
      lane.open(5.0)
      accepted = listener.accept
      lane.use(Patient.new(0))
      accepted.write("HTTP/1.1 413 Too Large\r\nContent-Length: 2\r\n\r\nno")
      lane.half_close # whoever writes now gets EPIPE

      lane.write("more")

      assert_equal([[413, { "content-length" => "2" }], "no", nil], [lane.read_head, lane.next_part, lane.next_part])
      lane.close
      accepted.close
    end
  end

  def test_an_answer_without_end_ends_with_its_time
    chunked = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    { "" => "HTTP/1.1 100 Continue\r\n\r\n" * 1_000, "#{chunked}0\r\n" => "a: b\r\n" * 3_000,
      chunked => "1;#{"x" * 60_000}\r\na\r\n" }.each do |head, more|
      @server = ScriptedServer.open do |request|
        request.socket.write(head)
        loop { request.socket.write(more) }
      rescue SystemCallError, IOError
        nil # the client hung up
      end

      assert_raises(Volcano::Error::TransportError) { Timeout.timeout(10) { client(@server.url, timeout: 0.3).locks.get("k") } }
      @server.close
    end
  end

  # Stands for an exchange whose time is never over.
  Patient = Struct.new(:waits) do
    def wait
      self.waits += 1
      nil until yield(0.05)
      true
    end
  end

  private

  def locks_of(&script)
    @server = ScriptedServer.open(&script)
    client(@server.url, timeout: 5).locks
  end
end

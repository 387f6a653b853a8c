# frozen_string_literal: true

require "io/wait"
require "net/http"
require "openssl"
require "volcano/discreet"

module Volcano
  # One connection, and HTTP/1.1 on it: requests and their answers, one exchange after the other.
  #
  #   open ── use ── write ──> read_head ──> next_part, next_part, … nil ── rest ── use … ──> close
  #
  # Net::HTTP opens it, with its proxies, TLS and name resolution. What goes over it afterwards is written and read
  # here: Net::HTTP's own requests cost twice the CPU of ours and more (benchmarks/ruby.rb), are sent again, and
  # their answers cannot be read as they come. Of HTTP there is what RFC 9112 asks of a client that reads to the end or hangs up.
  # @api private
  class Lane
    include Discreet

    # Idle lanes are closed after this: below the idle limits of common servers and load balancers.
    IDLE_SECONDS = 30.0
    PART_BYTES = 16_384
    # More than any head, chunk's size or trailer.
    HEAD_BYTES = 65_536
    # More than any answer of a call. An answer that came late is read all the same, but one without end is not.
    LONG_BYTES = 1_048_576

    # What may go wrong on the way. Timeout::Error itself is not in the list: that one is the user's.
    BROKEN = [
      SystemCallError, SocketError, IOError, OpenSSL::SSL::SSLError, Net::OpenTimeout, Net::ReadTimeout, Net::WriteTimeout,
      Net::ProtocolError, Net::HTTPBadResponse, Net::HTTPHeaderSyntaxError
    ].freeze

    HEAD_END = /\r?\n\r?\n/n
    STATUS_LINE = %r{\AHTTP/1\.([01]) ([1-9]\d\d)(?: [^\n]*)?\z}n
    FIELD_NAME = /\A[!#$%&'*+.^_`|~0-9A-Za-z-]+\z/n
    CHUNK_SIZE = /\A(\h{1,8})[ \t]*(?:;|\z)/n
    private_constant :HEAD_END, :STATUS_LINE, :FIELD_NAME, :CHUNK_SIZE

    # A session of Net::HTTP's that lends its socket.
    class Opener < Net::HTTP
      def socket
        @socket.io
      end
    end
    private_constant :Opener

    # @param proxy [Array] as Net::HTTP.new takes it: address, port, user, password; [nil] for none
    def initialize(uri, proxy)
      @uri = uri
      @proxy = proxy
      @io = nil # a TCPSocket, or an SSLSocket around one
      @exchange = nil # whose waiting it is
      @came = 0
      @buffer = String.new # what came and was not taken
      @keeps_alive = true
      @resting_since = nil
    end

    # --- its life ----------------------------------------------------------------------------------

    def open(seconds)
      http = Opener.new(@uri.hostname, @uri.port, *@proxy)
      http.use_ssl = @uri.scheme == "https"
      http.open_timeout = http.read_timeout = http.write_timeout = seconds
      @io = http.start.socket
    end

    def open?
      !@io.nil? && !@io.closed?
    end

    # The exchange that it belongs to from now on, until it rests.
    def use(exchange)
      @exchange = exchange
      @came = 0 # bytes
    end

    def rest(now)
      @exchange = nil
      @resting_since = now
    end

    def idle?(now)
      now - @resting_since >= IDLE_SECONDS
    end

    # Can another request follow, by what is known of the last?
    def reusable?
      open? && @keeps_alive && @buffer.empty?
    end

    # May no request be sent on it any more? What can be read from an idle connection is its end, or an answer that
    # nobody asked for.
    def stale?(now)
      !reusable? || idle?(now) || @io.read_nonblock(1, exception: false) != :wait_readable
    rescue *BROKEN
      true
    end

    # Did the server say something, or close the connection?
    def readable?
      !IO.select([@io], nil, nil, 0).nil?
    rescue SystemCallError, IOError
      true # closed meanwhile
    end

    def close
      @io&.close
    rescue *BROKEN
      nil # it was broken before
    end

    # From another thread. A `close` would wait for the thread that reads, and it for its shield.
    def abort
      @io&.to_io&.shutdown
    rescue SystemCallError, IOError
      nil # it has ended already
    end

    # From another thread: says that no request will follow. The answer is still read.
    def half_close
      @io&.to_io&.shutdown(:WR)
    rescue SystemCallError, IOError
      nil # it has ended already
    end

    # In the child of a fork: without a word on it.
    def forget
      @io&.to_io&.close
    end

    # --- a request and its answer ------------------------------------------------------------------

    # One write, as far as the socket takes it: two would be two packets.
    def write(message)
      until message.empty?
        case written = @io.write_nonblock(message, exception: false)
        when Integer then message = message.byteslice(written..)
        else wait(written)
        end
      end
    rescue Errno::EPIPE
      nil # what the server said before it hung up can be read
    end

    # The status, and the headers by their lower-case names. Then the body can be read.
    def read_head
      status = version = nil
      until status && status >= 200 # what comes before says nothing of the request
        lines = head_lines
        version, status = STATUS_LINE.match(lines.shift)&.captures&.map(&:to_i)
        raise Net::HTTPBadResponse, "wrong status line" unless status
      end
      headers = headers_of(lines)
      expect_body(status, headers)
      said = headers.fetch("connection", "")
      @keeps_alive = !@left.nil? && (version == 1 ? !said.match?(/\bclose\b/i) : said.match?(/\bkeep-alive\b/i))
      [status, headers]
    end

    # The next bytes of the body, as soon as there are any; nil at its end.
    def next_part
      begin_chunk if @chunked && @left.zero?
      return if @left&.zero?

      part = take(@left)
      @left -= part.bytesize if @left
      part
    rescue EOFError
      raise if @left

      @left = 0 # the end of the connection is that of the body
      nil
    end

    private

    # --- heads and bodies --------------------------------------------------------------------------

    def head_lines
      until (length = @buffer.index(HEAD_END))
        fill_head
      end
      head = @buffer.slice!(0, length)
      @buffer.slice!(HEAD_END)
      head.split(/\r?\n(?![ \t])/n) # a line that begins so goes on with the one before
    end

    def headers_of(lines)
      lines.each_with_object({}) do |line, headers|
        name, value = line.split(":", 2)
        raise Net::HTTPBadResponse, "wrong header line" unless value && FIELD_NAME.match?(name)

        name.downcase!
        value.strip!
        headers[name] = headers.key?(name) ? "#{headers[name]}, #{value}" : value
      end
    end

    # left: of the chunk or the body; nil: up to the end of the connection.
    def expect_body(status, headers)
      coding, length = headers.values_at("transfer-encoding", "content-length")
      @chunked = false
      if [204, 304].include?(status) then @left = 0
      elsif coding
        raise Net::HTTPBadResponse, "wrong transfer encoding" unless coding.casecmp?("chunked")

        @chunked = @at_start = true
        @left = 0
      elsif length
        raise Net::HTTPBadResponse, "wrong content length" unless length.match?(/\A\d{1,15}\z/)

        @left = length.to_i
      else @left = nil
      end
    end

    # Goes on to the next chunk, or over the trailer to the end.
    def begin_chunk
      raise Net::HTTPBadResponse, "wrong chunk" unless @at_start || line.empty?

      @at_start = false
      @left = (CHUNK_SIZE.match(line) || raise(Net::HTTPBadResponse, "wrong chunk"))[1].hex
      return unless @left.zero?

      @chunked = false
      nil until line.empty?
    end

    def line
      until (length = @buffer.index("\n"))
        fill_head
      end
      @buffer.slice!(0, length + 1).chomp
    end

    def fill_head
      raise Net::HTTPBadResponse, "a head without end" if @buffer.bytesize > HEAD_BYTES

      fill
    end

    # What has come, and `most` bytes of it at most, where given.
    def take(most)
      fill if @buffer.empty?
      return @buffer.slice!(0, most) if most && most < @buffer.bytesize

      part, @buffer = @buffer, String.new
      part
    end

    # --- the socket --------------------------------------------------------------------------------

    def fill
      loop do
        case part = @io.read_nonblock(PART_BYTES, exception: false)
        when String then return take_in(part)
        when nil then raise EOFError, "the connection ended"
        else wait(part)
        end
      end
    end

    def take_in(part)
      @came += part.bytesize
      raise Net::ReadTimeout if @came > LONG_BYTES && @exchange.over?

      @buffer << part
    end

    # wanted: :wait_readable or :wait_writable. With TLS either may stand in the way of both.
    def wait(wanted)
      io = @io.to_io
      ready = @exchange.wait { |seconds| wanted == :wait_readable ? io.wait_readable(seconds) : io.wait_writable(seconds) }
      raise Net::ReadTimeout unless ready
    end
  end
end

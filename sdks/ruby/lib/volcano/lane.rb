# frozen_string_literal: true

require "io/wait"
require "net/http"
require "openssl"
require "volcano/discreet"
require "volcano/version"

module Volcano
  # One connection: a session of Net::HTTP's that one exchange has to itself from its first byte to its last.
  #
  #   open ── use ── request ── rest ── use … ──> close
  #
  # Redirects, Net::HTTP's own retries and its 60 s timeouts are off. Of its inside, which is the same from Ruby 3.1 to 4.0:
  #
  # - It hands the socket, a Net::BufferedIO, to `exec` of a request, which writes it (Wire).
  # - That reads by `read_nonblock` of the IO in it, and waits by its `wait_readable` and `wait_writable` (PatientSocket), with
  #   zero seconds before each request on a kept connection.
  # - Net::BufferedIO's `read`, `read_all` and `readline` hand over what they have before they ask for more (here and in Stream).
  # @api private
  class Lane
    include Discreet

    # Idle lanes are closed after this: below the idle limits of common servers and load balancers.
    IDLE_SECONDS = 30.0

    # What may go wrong on the way. Timeout::Error itself is not in the list: that one is the user's.
    BROKEN = [
      SystemCallError, SocketError, IOError, OpenSSL::SSL::SSLError, Net::OpenTimeout, Net::ReadTimeout, Net::WriteTimeout,
      Net::ProtocolError, Net::HTTPBadResponse, Net::HTTPHeaderSyntaxError
    ].freeze

    # A request on its way: Net::HTTP calls `exec` when the connection stands.
    class Wire < Net::HTTPGenericRequest
      # The first spares a search for it.
      HEADERS = { "Accept-Encoding" => "identity", "Accept" => "application/json", "User-Agent" => "volcano-sdk-ruby/#{VERSION}" }.freeze
      private_constant :HEADERS

      def initialize(request, path, exchange)
        headers = HEADERS.merge(request.headers)
        headers["Content-Length"] = request.body.bytesize.to_s if request.body
        super(request.http_method, !request.body.nil?, true, path, headers)
        self.body = request.body
        @exchange = exchange
      end

      # Head and body in one write: two would be two packets.
      def exec(socket, version, path)
        @exchange.sending(socket)
        message = +"#{method} #{path} HTTP/#{version}\r\n"
        each_header { |name, value| message << name << ": " << value << "\r\n" }
        message << "\r\n"
        message << body if body
        socket.write(message)
      end
    end

    # On the socket of a lane, and on the one around it for TLS: waiting looks at the clock and for interrupts, and what comes is counted.
    module PatientSocket
      attr_writer :exchange

      def read_nonblock(...)
        super.tap { |part| @exchange.came(part.bytesize) if part.is_a?(String) }
      end

      # Net::HTTP's own look at a kept connection, with zero seconds, is a system call for nothing: `stale?` has read from it.
      def wait_readable(timeout = nil)
        self if timeout != 0 && @exchange.wait { |seconds| super(seconds) }
      end

      def wait_writable(_timeout = nil)
        self if @exchange.wait { |seconds| super(seconds) }
      end
    end
    private_constant :PatientSocket

    # Whose waiting it is between two exchanges. A throw costs less than the error for a timeout.
    module Nobody
      def self.wait
        throw(self, false)
      end

      def self.came(_bytes); end
    end
    private_constant :Nobody

    # @param http [Net::HTTP]
    def initialize(http)
      @http = http
      @http.max_retries = 0
      @http.keep_alive_timeout = 2 * IDLE_SECONDS # ours ends first
      @socket = nil # Net::BufferedIO
      @io = nil # the TCP socket in it
      @resting_since = nil
    end

    def open(seconds)
      @http.open_timeout = @http.read_timeout = @http.write_timeout = seconds
      @http.start
    end

    def open?
      @http.started? && !@io.nil? && !@io.closed?
    end

    # The socket that the exchange's waiting goes through from now on.
    def use(socket, exchange)
      @socket = socket
      @io = socket.io.to_io
      self.waiting = exchange
    end

    def rest(now)
      self.waiting = Nobody if @io
      @resting_since = now
    end

    def idle?(now)
      now - @resting_since >= IDLE_SECONDS
    end

    # May no request be sent on it any more?
    def stale?(now)
      !open? || idle?(now) || unasked?
    end

    # Did the server say something, or close the connection?
    def readable?
      !IO.select([@io], nil, nil, 0).nil?
    rescue SystemCallError, IOError
      true # closed meanwhile
    end

    # Returns the response. The block is given it when its head has come.
    def request(wire, &read)
      @http.request(wire, &read)
    rescue ArgumentError => error # of Net::HTTP's for a header of the answer
      raise Net::HTTPBadResponse, error.message
    end

    def close
      @http.finish if @http.started?
    rescue *BROKEN
      nil # it was broken before
    end

    # From another thread. A `close` would wait for the thread that reads, and it for its shield.
    def abort
      @io&.shutdown
    rescue SystemCallError, IOError
      nil # it has ended already
    end

    # From another thread: says that no request will follow. The answer is still read.
    def half_close
      @io&.shutdown(:WR)
    rescue SystemCallError, IOError
      nil # it has ended already
    end

    # In the child of a fork: without a word on it.
    def forget
      @io&.close
    end

    private

    def waiting=(exchange)
      [@io, @socket.io].uniq.each do |io|
        io.extend(PatientSocket) unless io.is_a?(PatientSocket)
        io.exchange = exchange
      end
    end

    # What can be read from an idle connection is its end, or an answer that nobody asked for.
    def unasked?
      catch(Nobody) do
        @socket.read(1)
        true
      end
    rescue *BROKEN
      true
    end
  end
end

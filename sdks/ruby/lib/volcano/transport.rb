# frozen_string_literal: true

require "uri"
require "volcano/discreet"
require "volcano/lane"
require "volcano/operations"
require "volcano/shield"

module Volcano
  # The only file that touches the network: one try in, its Answer or Failure out.
  #
  # One exchange has a Lane, which is a connection, to itself from its first byte to its last. Free lanes wait in a stack. A lane
  # whose exchange was interrupted, timed out or failed is closed and never used again, so no answer can reach another
  # request. A lane that the server closed, or that was idle for long, is noticed and replaced before anything is sent;
  # once bytes went out, nothing is ever sent again from here.
  #
  # A try is bounded as a whole: each wait for the socket looks at the clock, so a server that dribbles
  # bytes gains nothing. A call's connection is opened by a thread of its own, which is gone with that: Ruby
  # cannot interrupt name resolution, and a Net::HTTP that is interrupted while it connects leaves its
  # socket to the garbage collector.
  # @api private
  class Transport
    # @param uri [URI::HTTP] the API's URL; its path, if any, comes before the operations' paths
    # @param proxy [URI::HTTP, nil]
    # @param openers [Boolean] may it use further threads? The workers, which nobody interrupts, connect themselves
    def initialize(uri, proxy:, clock:, openers: true)
      @uri = uri
      @path = uri.path.chomp("/")
      @proxy = proxy
      @clock = clock
      @openers = openers
      @mutex = Mutex.new
      @free = [] # [Lane, …] the latest used last
      @exchanges = [] # [Exchange, …] begun and not ended
      @closed = false
    end

    # The exchanges in flight; an open stream is none.
    def exchanges
      begun.reject(&:streaming?)
    end

    # The open streams.
    def streams
      begun.select(&:streaming?)
    end

    # Sends one try and returns its outcome. An interrupt leaves at once. The block, if any, is given the
    # exchange, for whoever may want to abort it.
    def call(try)
      exchange = exchange_of(try)
      enter(exchange)
      yield exchange if block_given?
      outcome = connect(exchange) || exchange.perform
    ensure
      Shield.up { leave(exchange, outcome) } if exchange
    end

    # The same under the shield: an interrupt waits for the answer, `patience` seconds at most where given;
    # only while connecting it leaves at once. The block is told an outcome in any case, before the
    # interrupt goes on.
    def see_through(try, patience: nil)
      exchange = exchange_of(try, patience: patience)
      enter(exchange)
      outcome = connect(exchange)
      Shield.up { outcome ||= exchange.perform }
    ensure
      if exchange
        Shield.up do
          yield outcome || exchange.failure("was interrupted")
        ensure
          leave(exchange, outcome)
        end
      end
    end

    # Opens a Stream. Nil when it is open, else the outcome.
    def begin_stream(stream)
      enter(stream)
      connect(stream) || stream.perform
    end

    # Must follow, whatever came of that. Once more does no harm.
    def end_stream(stream, outcome)
      Shield.up { leave(stream, outcome) }
    end

    # Ends what is in flight, but for releases, and closes every connection. A call that was granted a lease meanwhile, or
    # may have been, can still give it back.
    def close
      Shield.up do
        free, in_flight = @mutex.synchronize do
          @closed = true
          [@free.slice!(0..), @exchanges.select { |exchange| too_late?(exchange) }]
        end
        in_flight.each(&:abort)
        free.each(&:close)
      end
    end

    # In the child of a fork: lets go of the parent's sockets without a word on them.
    def forget
      [*@free, *@exchanges.map(&:lane)].compact.each(&:forget)
    end

    # Where requests go, for error messages; without credentials.
    def destination
      place = "#{@uri.scheme}://#{@uri.host}:#{@uri.port}"
      @proxy ? "#{place} through the proxy #{@proxy.scheme}://#{@proxy.host}:#{@proxy.port}" : place
    end

    # The path on the wire of an operation's path.
    def path(operation_path)
      "#{@path}#{operation_path}"
    end

    private

    def begun
      Shield.up { @mutex.synchronize { @exchanges.dup } }
    end

    def too_late?(exchange)
      @closed && exchange.try.request.operation != "release"
    end

    def exchange_of(try, patience: nil)
      Exchange.new(try, transport: self, clock: @clock, patience: patience)
    end

    def enter(exchange)
      Shield.up { @mutex.synchronize { @exchanges << exchange } }
    end

    # Gives the exchange an open lane; nil, or the Failure.
    def connect(exchange)
      return exchange.failure("was not sent: this client is closed") if too_late?(exchange)

      reuse(exchange)
      open_apart(exchange) unless exchange.lane
      exchange.failure("could not connect to #{destination} in time") unless exchange.lane
    rescue *Lane::BROKEN => error
      exchange.failure("could not connect to #{destination}: #{error.message}", error)
    end

    # Gives it the lane that was used last and can still be used.
    def reuse(exchange)
      Shield.up do
        while (exchange.lane = @mutex.synchronize { @free.pop })
          return unless exchange.lane.stale?(@clock.now)

          exchange.lane.close
        end
      end
    end

    # Opens a lane for it, on another thread if possible, and waits for that no longer than the try may take.
    def open_apart(exchange)
      return open(exchange) unless @openers

      begin
        opener = Shield.thread("volcano connection") { open(exchange) }
      rescue ThreadError
        return open(exchange)
      end
      nil until opener.join(Exchange::SLICE_SECONDS) || exchange.over?
    end

    def open(exchange)
      lane = Lane.new(session)
      lane.open(exchange.seconds_left)
      wanted = @mutex.synchronize { exchange.lane = lane if @exchanges.include?(exchange) && !too_late?(exchange) }
      lane.close unless wanted
    end

    def leave(exchange, outcome)
      retired = @mutex.synchronize do
        next [] unless @exchanges.delete(exchange)

        lane = exchange.lane
        lane&.rest(@clock.now)
        keep = outcome.is_a?(Operations::Answer) && lane.open? && !@closed
        @free.push(lane) if keep
        [keep ? nil : lane, *@free.slice!(0, @free.index { |free| !free.idle?(@clock.now) } || 0)].compact
      end
      retired.each(&:close)
    end

    def session
      http = Net::HTTP.new(@uri.hostname, @uri.port, *proxy_arguments)
      http.use_ssl = @uri.scheme == "https"
      http
    end

    def proxy_arguments
      return [nil] unless @proxy

      [@proxy.hostname, @proxy.port, *[@proxy.user, @proxy.password].map { |part| part && URI.decode_www_form_component(part) }]
    end

    # One try on its way, from before it connects until its lane is free again.
    class Exchange
      include Discreet

      # A wait for the socket is cut into slices of this, to see interrupts.
      SLICE_SECONDS = 0.05
      # More than any answer of a lock server, with its head: one about 500 leases takes a quarter of it.
      BODY_BYTES = 524_288

      # seconds: how long it may take, as was asked last; deadline: until when.
      attr_reader :try, :seconds, :deadline, :began_at, :thread
      attr_accessor :lane

      def initialize(try, transport:, clock:, patience:)
        @try = try
        @transport = transport
        @clock = clock
        @patience = patience
        @thread = Thread.current
        @began_at = clock.now
        @seconds = try.timeout
        @deadline = @began_at + @seconds
        @sent_at = nil
        @bytes = 0
        @waiting = false
        @aborted = false
        @hurried = false
      end

      # Is it up to the server or the clock how it goes on?
      def at_rest?
        @waiting && !@aborted && !interrupted? && !@lane.readable? && !@clock.reached?(@deadline)
      end

      def seconds_left
        [@deadline - @clock.now, 0.001].max
      end

      # A Stream may be past that.
      def streaming?
        false
      end

      # Sends and reads. Returns the Answer, or the Failure.
      def perform
        @sent_at = @clock.now
        body = nil
        response = @lane.request(Lane::Wire.new(@try.request, @transport.path(@try.request.path), self)) { |answer| body = read_body(answer) }
        Operations::Answer.new(sent_at: @sent_at, status: response.code.to_i, headers: response, body: body)
      rescue *Lane::BROKEN => error
        failure("got no answer from #{@transport.destination}: #{why(error)}", error)
      end

      def failure(what, cause = nil)
        error = Error::TransportError.new("#{@try.request.operation} #{what}", request_id: @try.request.request_id)
        Operations::Failure.new(sent_at: @sent_at || @began_at, error: Error.with_cause(error, cause), reached: !@sent_at.nil?)
      end

      # The request is about to be written there.
      def sending(socket)
        @lane.use(socket, self)
        raise IOError, "closed" if @aborted
      end

      # So many bytes more. Net::HTTP reads heads, chunks' sizes and trailers without end, and waits for nothing while they come.
      def came(bytes)
        @bytes += bytes
        raise IOError, "the answer is longer than #{BODY_BYTES} bytes" if @bytes > BODY_BYTES
      end

      # Waits for the socket in slices. False when the time is over.
      def wait
        @waiting = true
        until over?
          return true if yield [SLICE_SECONDS, seconds_left].min
        end
        false
      ensure
        @waiting = false
      end

      # From another thread: it fails at once.
      def abort
        @aborted = true
        @lane&.abort
      end

      # Has it taken as long as it may?
      def over?
        hurry if interrupted?
        @aborted || @clock.reached?(@deadline)
      end

      private

      # Does somebody interrupt the caller, unnoticed so far?
      def interrupted?
        @patience && !@hurried && @thread.pending_interrupt?
      end

      def hurry
        @hurried = true
        until_then = @clock.now + @patience
        @seconds, @deadline = @patience, until_then if until_then < @deadline
      end

      # The head has come.
      def read_body(answer)
        body = answer.body or return # a 204 has none
        early = !answer.chunked? && body.bytesize < answer.content_length.to_i # Net::HTTP lets it pass
        raise EOFError, "the answer ends early" if early

        body.dup.force_encoding(Encoding::UTF_8)
      end

      def why(error)
        return "none within #{(@deadline - @began_at).round(3)} s" if @clock.reached?(@deadline)

        @aborted ? "given up" : error.message
      end
    end
  end
end

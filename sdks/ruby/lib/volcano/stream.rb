# frozen_string_literal: true

require "volcano/events"
require "volcano/transport"

module Volcano
  # One event stream on its way: an exchange up to the head of its answer, then events as they come, until either
  # side ends it. It has a lane to itself, and no limit of time but silence.
  #
  #   open ── 200 text/event-stream ──> next_events, next_events, … nil ──> close
  #     └──── the outcome of anything else ───────────────────────────────> close
  #
  # Whoever opens it reads it, and closes it in an `ensure`; any thread may retire or abort it.
  # @api private
  class Stream < Transport::Exchange
    # A server sends a comment every 15 s. Nothing for so long is a connection that nobody noticed break.
    SILENCE_SECONDS = 40.0
    # So long a server may take to end a stream that is not needed any more.
    RETIRED_SECONDS = 1.0

    # Where the bytes of a body go when Net::BufferedIO reads them: out of it, as soon as there are any.
    module Part
      def self.<<(bytes)
        throw(self, bytes) unless bytes.empty?
      end
    end
    private_constant :Part

    # How many bytes of the body were read.
    attr_reader :taken

    # @param last_id [String] what the stream before it ended with
    def initialize(try, transport:, clock:, last_id: "")
      super(try, transport: transport, clock: clock, patience: nil)
      @parser = Events::Parser.new(last_id)
      @streaming = false
      @taken = 0
      @retirement = nil
      @socket = nil # Net::BufferedIO
    end

    # Is it past the head, and not closed?
    def streaming?
      @streaming
    end

    # Sends the request. Nil when the stream is open, else the outcome that stands in its way.
    def open
      @outcome = @transport.begin_stream(self)
    end

    # What is told by the next bytes: [LockEvent, …], empty for a comment; nil at the end, whoever brought that about.
    def next_events
      part = next_part or return

      events = @parser.feed(part).filter_map { |message| Events.read(message) }
      events if @parser.kept <= BODY_BYTES
    end

    # Where the next stream should go on.
    def last_id
      @parser.last_id
    end

    # From another thread: another stream has taken its place. What the server has told by now is still read.
    def retire
      @retirement = @clock.at(@clock.now + RETIRED_SECONDS) { abort }
      @lane&.half_close
    end

    def close
      @transport.end_stream(self, @outcome)
      @retirement&.cancel
      @streaming = false
    end

    # Is it up to the server or the clock how it goes on?
    def at_rest?
      @streaming ? @waiting && !@lane.readable? : super
    end

    # Nil when it is open, else the outcome.
    def perform
      catch(self) { super }
    end

    def sending(socket)
      super
      @socket = socket
    end

    # An open stream waits for bytes as long as there was no silence.
    def wait
      return super unless @streaming

      begin
        silence = @clock.at(@clock.now + SILENCE_SECONDS) { abort }
        @waiting = true
        yield(nil)
      ensure
        @waiting = false
        silence&.cancel
      end
    end

    private

    # Nil at the end of the body.
    def next_part
      @bytes = 0
      part = catch(Part) { read_on } or return

      @left -= part.bytesize if @left
      @taken += part.bytesize
      part
    rescue *Lane::BROKEN
      nil
    end

    # The head of an answer has come; that of a double in the place of Net::HTTP without a socket.
    def read_body(answer)
      return super unless @socket && answer.code == "200" && answer.content_type == "text/event-stream"

      @chunked = answer.chunked?
      @left = @chunked ? 0 : answer.content_length # of the chunk or the body; nil: up to the end of the connection
      @at_start = true
      @streaming = true
      throw(self) # Net::HTTP would not let go of the answer before its end, not even for a `break`
    end

    # Throws the next bytes; returns at the end of the body.
    def read_on
      return if (@chunked ? begin_chunk : @left)&.zero?

      @left ? @socket.read(@left, Part) : @socket.read_all(Part)
      nil
    end

    # Goes on to the next chunk where one has ended. Returns what is left of it.
    def begin_chunk
      return @left if @left.positive?

      @socket.readline unless @at_start
      @at_start = false
      @left = Integer(@socket.readline[/\A\h{1,8}/] || raise(Net::HTTPBadResponse, "no chunk"), 16)
    end
  end
end

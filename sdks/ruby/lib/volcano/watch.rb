# frozen_string_literal: true

require "volcano/discreet"
require "volcano/operations"
require "volcano/shield"
require "volcano/stream"
require "volcano/waiting"

module Volcano
  # What `client.locks.watch` enumerates: events, over one stream after the other. docs/semantics.md#watching
  #
  # Everything happens on the thread of whoever iterates: there is none of the SDK's. The stream ends with the iteration.
  # After `next` the iteration is a fiber of Ruby's that nobody may ever resume, and Ruby runs no `ensure` for one that is
  # collected: hence `rewind`, which Enumerator#rewind calls, and a finalizer.
  # @api private
  class Watch
    include Discreet

    # One `each` under way. `streams`: the one that it reads.
    Iteration = Struct.new(:thread, :fiber, :streams) do
      include Discreet
    end
    private_constant :Iteration

    def initialize(client, filters)
      @client = client
      @filters = filters
      @iterations = []
    end

    # Yields each LockEvent, until the client is closed.
    def each(&block)
      mark = Object.new # on this stack alone, and so gone with it
      iteration = Iteration.new(Thread.current, Fiber.current, [])
      ObjectSpace.define_finalizer(mark, self.class.closer_of(iteration.streams))
      @iterations << iteration
      follow(iteration.streams, &block)
    ensure
      if iteration
        ObjectSpace.undefine_finalizer(mark)
        @iterations.delete_if { |other| other.equal?(iteration) }
      end
    end

    # Ends what this thread began with `next`.
    def rewind
      @iterations.each do |iteration|
        iteration.streams.each(&:close) if iteration.thread == Thread.current && iteration.fiber != Fiber.current
      end
    end

    # A finalizer. It must not know the iteration, or that would live for ever; and a mutex may be held where it runs.
    def self.closer_of(streams)
      lambda do |_object_id|
        Shield.thread("volcano events") { streams.each(&:close) } unless streams.empty?
      rescue ThreadError
        nil # the process ends, and the sockets with it
      end
    end

    private

    def follow(streams, &block)
      session = @client.session
      backoff = Waiting::Backoff.new
      last_id = ""
      later = false # than the first that opened
      goes_on = true
      while goes_on # not `loop`: that would take a StopIteration of the block's
        session = @client.session unless session.mine?
        request = Operations.watch(@filters, last_id: last_id, **@client.locks.sender)
        attempt = Operations::Try.new(request: request, timeout: @client.timeout)
        stream = Stream.new(attempt, transport: session.transport, clock: session.clock, last_id: last_id)
        streams.replace([stream])
        begin
          error = read(stream, request, backoff, gap: later && last_id.empty?, &block)
          later ||= error.nil?
        ensure
          stream.close
        end
        last_id = stream.last_id
        goes_on = session.waiting_room.pause(backoff.failed(error&.retry_after, Random.rand(-1.0..1.0)))
      end
    end

    # Yields what the stream tells, to its end. Returns why it did not open, where another may. gap: what happened since
    # the one before is not told.
    def read(stream, request, backoff, gap:)
      if (outcome = stream.open)
        error = Operations.not_opened(request, outcome)
        case error
        when *Waiting::PASSING then return error
        else raise error, cause: error.cause
        end
      end

      yield Events::RESET if gap
      while (events = stream.next_events)
        backoff.worked
        events.each { |event| yield event }
      end
    end
  end
end

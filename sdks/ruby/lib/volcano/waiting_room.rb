# frozen_string_literal: true

require "volcano/discreet"
require "volcano/events"
require "volcano/operations"
require "volcano/shield"
require "volcano/stream"
require "volcano/waiting"

module Volcano
  # Where the calls of one client wait for keys that are held, and the one stream of events that wakes them.
  #
  # Each waits on its own thread, the caller's. The stream has a thread that comes with it and goes with it, and there is
  # one only while somebody waits; while it is not open, each call polls for itself. When the stream does not tell of all
  # the keys any more, one that does is opened first and the old one closed then.
  #
  # Of those that are to try for the same key only one does, and the others stand back: whether it gets the key or not,
  # they could not. If it leaves without an answer, they step forward.
  #
  #   nobody waits ── a call ──> opening ── open ──> open ── a further key ──> open, and another opening
  #        ^                        ^  └── refused ──┐ └── lost ──┐               │ open: the old one is closed
  #        └── the last has left    └── backoff ─────┴────────────┘<──────────────┘
  #
  # One mutex guards all of it: who waits, for what, and the streams. Nobody does I/O while holding it.
  # @api private
  class WaitingRoom
    include Discreet

    # A call that waits. `over_timer`: for the end of its wait; `timer`: for its next step; `stirred`: it may go on;
    # `busy`: it is at a step; `behind`: the Waiter that tries in its place.
    class Waiter
      include Discreet

      attr_reader :key, :turn, :changed
      attr_accessor :over_timer, :timer, :stirred, :busy, :behind

      def initialize(room, key, over_at)
        @room = room
        @key = key
        @turn = Waiting::Turn.new(over_at)
        @changed = ConditionVariable.new
        @stirred = @busy = false
        @behind = nil
      end

      # Waits for the next step: :try, :poll or :give_up.
      # @raise [Error] the client is closed
      def next_step
        @room.next_step(self)
      end

      # Its try was answered, well or by a refusal: somebody has the key.
      def held
        @room.held(self)
      end

      # Its try failed, and another may do better: which for all that wait for the key begins no sooner.
      def failed(error)
        @room.failed(self, error)
      end

      # Its poll was answered with this LockState, which is for all that wait for the key.
      def read(state)
        @room.read(@key, state)
      end

      # Its poll failed, which is for all of them too.
      def not_read(error)
        @room.not_read(self, error)
      end
    end

    # A stream of the room's, from before it opens.
    Listening = Struct.new(:filters, :request, :stream, keyword_init: true)

    # @param sender [Proc] -> the credential and a new request id
    # @param log [Proc] told a sentence about what nobody else would hear of
    def initialize(clock:, transport:, timeout:, sender:, log:)
      @clock = clock
      @transport = transport
      @timeout = timeout
      @sender = sender
      @log = log
      @mutex = Mutex.new
      @waiters = {} # {"nightly" => [Waiter, …]}
      @expiries = {} # {"nightly" => Waiting::Expiry}
      @open = nil # the Listening that tells of their keys
      @opening = nil # the Listening that will
      @backoff = Waiting::Backoff.new
      @not_before = -Float::INFINITY # when the next may be opened
      @retry_timer = nil
      @last_id = "" # how far the one that was lost had come
      @lacking = false # has the server no events?
      @pauses = [] # [ConditionVariable, …]
      @closed = false
    end

    # Yields a Waiter for that key, on which to wait.
    def enter(key, over_at)
      waiter = Waiter.new(self, key, over_at)
      synchronize { admit(waiter) }
      yield waiter
    ensure
      leave(waiter) if waiter
    end

    # The waiting of a Waiter.
    def next_step(waiter)
      until (step = synchronize { step_of(waiter) })
        @mutex.synchronize { waiter.changed.wait(@mutex) until waiter.stirred }
      end
      step
    end

    def failed(trier, error)
      synchronize do
        trier.turn.failed(error, @clock.now, Random.rand(-1.0..1.0))
        @waiters[trier.key].each { |waiter| [waiter.turn.hold_back(trier.turn.not_before), settle(waiter)] }
      end
    end

    def read(key, state)
      synchronize do
        early = @expiries.fetch(key).early(state, @clock.wall)
        settle_all(@waiters[key].each { |waiter| waiter.turn.read(state, @clock.now, early, rand) })
      end
    end

    def not_read(reader, error)
      synchronize do
        broken_off = @clock.now >= reader.turn.over_at
        settle_all(@waiters[reader.key].each { |waiter| waiter.turn.not_read(error, @clock.now, rand, broken_off: broken_off) })
      end
    end

    def held(trier)
      synchronize do
        # With another try ahead of it, since something happened during this one, they stay where they are.
        behind = trier.turn.to_try? ? [] : those_behind(trier).each { |waiter| waiter.behind = nil }
        [trier, *behind].each { |waiter| [waiter.turn.refused(@clock.now, rand), settle(waiter)] }
      end
    end

    # Waits so long, for one that reads a stream of its own. False when the client is closed.
    def pause(seconds)
      over_at = @clock.now + seconds
      over = ConditionVariable.new
      alarm = nil
      synchronize { [@pauses << over, alarm = timer(over_at) { over.signal }] }
      @mutex.synchronize { over.wait(@mutex) until @closed || @clock.now >= over_at }
      !@closed
    ensure
      synchronize { [@pauses.delete(over), alarm&.cancel] }
    end

    # At a close: ends all waiting.
    def close
      synchronize do
        @closed = true
        each_waiter { |waiter| stir(waiter) }
        @pauses.each(&:signal)
        arrange
      end
    end

    private

    def synchronize(&step)
      Shield.up { @mutex.synchronize(&step) }
    end

    # --- who waits ---------------------------------------------------------------------------------

    def admit(waiter)
      others = @waiters[waiter.key] ||= []
      others.each { |other| waiter.turn.hold_back(other.turn.not_before) }
      others << waiter
      @expiries[waiter.key] ||= Waiting::Expiry.new
      over_at = waiter.turn.over_at
      waiter.over_timer = timer(over_at) { stir(waiter) } if over_at.finite?
      if @open&.filters&.cover?(waiter.key)
        waiter.turn.covered(@clock.now, rand)
      else
        waiter.turn.uncovered(@clock.now, rand)
        arrange
      end
    end

    # Once more where an interrupt came through the shield.
    def leave(waiter)
      synchronize { dismiss(waiter) }
    ensure
      synchronize { dismiss(waiter) } if @waiters.fetch(waiter.key, []).any? { |other| other.equal?(waiter) }
    end

    def dismiss(waiter)
      waiter.over_timer&.cancel
      waiter.timer&.cancel
      remaining = @waiters.fetch(waiter.key, []).reject { |other| other.equal?(waiter) }
      remaining.empty? ? [@waiters, @expiries].each { |keys| keys.delete(waiter.key) } : @waiters[waiter.key] = remaining
      settle_all(those_behind(waiter).each { |other| [other.behind = nil, other.turn.step_forward(@clock.now)] })
      arrange if @waiters.empty?
    end

    def those_behind(trier)
      @waiters.fetch(trier.key, []).select { |waiter| waiter.behind.equal?(trier) }
    end

    def let_stand_back(trier)
      @waiters[trier.key].each do |waiter|
        next if waiter.equal?(trier)

        waiter.turn.stand_back
        waiter.behind = trier
        settle(waiter)
      end
    end

    def put_others_off(reader)
      @waiters[reader.key].each do |waiter|
        next if waiter.equal?(reader)

        waiter.turn.put_off(@clock.now, rand)
        settle(waiter)
      end
    end

    def each_waiter(&block)
      @waiters.values.flatten.each(&block)
    end

    def step_of(waiter)
      raise Error, "this client is closed" if @closed

      waiter.stirred = false
      step = waiter.turn.next_step(@clock.now)
      waiter.busy = !step.nil?
      case step
      when :try then let_stand_back(waiter)
      when :poll then put_others_off(waiter)
      when nil then settle(waiter)
      end
      step
    end

    # After a change for those that wait for a key. No thread is woken that would only stand back.
    def settle_all(waiters)
      trier = waiters.select { |waiter| waiter.turn.to_try? }.min_by { |waiter| [waiter.busy ? 1 : 0, waiter.turn.wakes_at] }
      let_stand_back(trier) if trier
      waiters.each { |waiter| settle(waiter) }
    end

    # Lets the call go on when there is a step for it, else when there may be. After every change.
    def settle(waiter)
      wakes_at = waiter.turn.wakes_at
      return if waiter.timer&.at == wakes_at

      waiter.timer&.cancel
      waiter.timer = nil
      if wakes_at <= @clock.now
        stir(waiter)
      elsif wakes_at.finite?
        waiter.timer = timer(wakes_at) { [waiter.timer = nil, stir(waiter)] }
      end
    end

    def stir(waiter)
      waiter.stirred = true
      waiter.changed.signal
    end

    # Nothing may end the timers' thread.
    def timer(moment, &action)
      @clock.at(moment) do
        synchronize(&action)
      rescue StandardError => error
        @log.call("a wait could not be looked after: #{error.class}: #{error.message}")
      end
    end

    # --- the streams -------------------------------------------------------------------------------

    # Sees to it that there is the stream that is needed, and no other. After every change.
    def arrange
      return quit if @closed || @waiters.empty?
      return if @opening || @lacking || (@open && @waiters.each_key.all? { |key| @open.filters.cover?(key) })

      if @not_before <= @clock.now
        start
      else
        @retry_timer ||= timer(@not_before) { [@retry_timer = nil, arrange] }
      end
    end

    def quit
      [@open, @opening].compact.each { |listening| listening.stream.abort }
      @open = @opening = nil
      @last_id = ""
      @retry_timer&.cancel
      @retry_timer = nil
    end

    def start
      filters = Events::Filters.of(@waiters.keys)
      last_id = @open ? "" : @last_id
      request = Operations.watch(filters, last_id: last_id, **@sender.call)
      attempt = Operations::Try.new(request: request, timeout: @timeout)
      stream = Stream.new(attempt, transport: @transport, clock: @clock, last_id: last_id)
      @opening = Listening.new(filters: filters, request: request, stream: stream)
      listening = @opening
      Shield.thread("volcano events") { listen(listening) }
    rescue ThreadError => error
      @log.call("a thread for events could not be started: #{error.message}")
      ended(@opening, nil)
    end

    def listen(listening)
      outcome = listening.stream.open
      synchronize { opened(listening) } unless outcome
      while outcome.nil? && (events = listening.stream.next_events)
        synchronize { heard(listening, events) }
      end
    rescue StandardError => error
      @log.call("events could not be read: #{error.class}: #{error.message}")
    ensure
      listening.stream.close
      synchronize { ended(listening, outcome) }
    end

    def opened(listening)
      return unless @opening.equal?(listening)

      old, @open, @opening = @open, listening, nil
      @waiters.each do |key, waiters|
        random = rand
        news = if !listening.filters.cover?(key) then :uncovered # it came while this one was opened
               elsif old&.filters&.cover?(key) then :doubtful
               else :covered
               end
        settle_all(waiters.each { |waiter| waiter.turn.public_send(news, @clock.now, random) })
      end
      old&.stream&.retire
      arrange
    end

    # Also what the old stream had still to say when another took its place.
    def heard(listening, events)
      @backoff.worked if listening.equal?(@open)
      events.each do |event|
        @waiters.each do |key, waiters|
          next unless event.key.nil? || event.key == key

          random = rand
          settle_all(waiters.each { |waiter| waiter.turn.heard(event, @clock.now, random) })
        end
      end
    end

    def ended(listening, outcome)
      if listening.equal?(@open)
        @open = nil
        @last_id = listening.stream.last_id unless listening.stream.last_id.empty?
        each_waiter { |waiter| [waiter.turn.uncovered(@clock.now, rand), settle(waiter)] }
      elsif listening.equal?(@opening)
        @opening = nil
        @lacking ||= Operations.lacking?(outcome)
      else
        return
      end
      error = outcome && Operations.not_opened(listening.request, outcome)
      @not_before = @clock.now + @backoff.failed(error&.retry_after, Random.rand(-1.0..1.0))
      arrange
    end
  end
end

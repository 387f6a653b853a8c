# frozen_string_literal: true

require "volcano/events"
require "volcano/operations"

module Volcano
  # How a call waits for a key that is held: what it does next, and when. Pure: `now`, randomness and what
  # happens go in. docs/semantics.md#waiting
  #
  #   try ── held ──> wait ── its stream opened, a release, …, what a poll read ──> try again
  #    │               └──── the time is over ──> the last refusal
  #    └── got it, or an error that stays ──> the end
  # @api private
  module Waiting
    # Where no stream tells of the key it is read so often, at random; and when the holder's lease and its grace are over,
    # if that is sooner: but no sooner than that.
    POLL_SECONDS = (1.0..5.0).freeze
    GRACE_SECONDS = 1.0
    SOONEST_POLL_SECONDS = 0.1
    # A read that hangs keeps its call from trying.
    LONGEST_POLL_SECONDS = 2.0
    # Those that hear the same event spread their tries over this for each other one, and over a second at most.
    SPREAD_SECONDS = 0.002
    LONGEST_SPREAD_SECONDS = 1.0
    # After these one may try again, and a watch opens another stream; any other answer will not pass.
    PASSING = [Error::RateLimitedError, Error::ServerError, Error::TransportError].freeze

    module_function

    # The longest wait in seconds, or ArgumentError.
    def checked_wait(wait)
      return wait > Float::MAX ? Float::INFINITY : wait.to_f if wait.is_a?(Numeric) && wait.real? && wait >= 0

      raise ArgumentError, "wait must be a number of seconds, 0 or more (Float::INFINITY: as long as it takes); got #{Operations.shown(wait)}"
    end

    # Seconds between an event and the try that follows it. `random`: 0 to 1.
    def spread(watchers, random)
      random * [[watchers - 1, 0].max * SPREAD_SECONDS, LONGEST_SPREAD_SECONDS].min
    end

    # Seconds between two reads of a key. `early`: until there is reason for the next one.
    def poll_delay(random, early = Float::INFINITY)
      [POLL_SECONDS.begin + random * (POLL_SECONDS.end - POLL_SECONDS.begin), early].min
    end

    # Seconds for one read. `left`: of its call's wait, which may be over since.
    def poll_timeout(client_timeout, left)
      [client_timeout, LONGEST_POLL_SECONDS, left].min.clamp(0.001..)
    end

    # When a key may be free, by what polls read of its holder's lease; one for all that wait for the key.
    class Expiry
      def initialize
        @overdue = nil
      end

      # Seconds until there is reason to read it again, after this LockState. `wall`: the time of day, in seconds since 1970.
      # Where a lease that was found to be over is still there, the clocks differ: that is no reason a second time.
      def early(state, wall)
        return Float::INFINITY if !state.held? || state.expires_at == @overdue

        left = state.expires_at.to_f + GRACE_SECONDS - wall
        @overdue = state.expires_at unless left.positive?
        [left, SOONEST_POLL_SECONDS].max
      end
    end

    # When to try again what fails again and again: 0.1 s later, doubling to 5 s, ±50 %, and not before `Retry-After`.
    class Backoff
      FIRST_SECONDS = 0.1
      LONGEST_SECONDS = 5.0
      private_constant :FIRST_SECONDS, :LONGEST_SECONDS

      def initialize
        @failures = 0
      end

      def worked
        @failures = 0
      end

      # The seconds until the next try. `jitter`: -1 to 1.
      def failed(retry_after, jitter)
        @failures += 1
        delay = [FIRST_SECONDS * 2.0**[@failures - 1, 60].min, LONGEST_SECONDS].min * (1 + 0.5 * jitter)
        [delay, retry_after || 0.0].max
      end
    end

    # One call that waits, from its first refusal on.
    #
    # Not thread-safe; the WaitingRoom guards it with its mutex.
    class Turn
      # When the wait is over; the Error that the latest try or poll failed with, if it did; and when the next may come.
      attr_reader :over_at, :trouble, :not_before

      def initialize(over_at)
        @over_at = over_at
        @try_at = @poll_at = Float::INFINITY
        @not_before = -Float::INFINITY
        @polls = @doubtful = false
        @watchers = 1
        @trouble = nil
        @backoff = Backoff.new
      end

      # --- what happens ---

      # From now on a stream tells of the key; what happened before is not known.
      def covered(now, random)
        @polls = @doubtful = false
        @poll_at = Float::INFINITY
        try_by(now + Waiting.spread(@watchers, random))
      end

      # No stream tells of the key yet, or any more.
      def uncovered(now, random)
        @poll_at = now + Waiting.poll_delay(random) unless @polls
        @polls = true
      end

      # Another stream tells of the key now, and what the old one had on its way may be lost: one look makes it good.
      def doubtful(now, random)
        @doubtful = true
        @poll_at = [@poll_at, now + Waiting.poll_delay(random)].min
      end

      # An event of the key, or a reset.
      def heard(event, now, random)
        @watchers = event.watchers || @watchers
        @trouble = nil if event.type == :acquired
        try_by(now + Waiting.spread(@watchers, random)) if Events::FREEING.include?(event.type)
      end

      # A try was answered, the call's own or that of another for which it stood back: the key is held.
      def refused(now, random)
        @trouble = nil
        @backoff.worked
        @poll_at = now + Waiting.poll_delay(random) if @polls
      end

      # Another call of the client tries for the key.
      def stand_back
        @try_at = Float::INFINITY
      end

      # That one found out nothing.
      def step_forward(now)
        try_by(now)
      end

      # A try failed, and the next may do better. `jitter`: -1 to 1.
      def failed(error, now, jitter)
        @trouble = error
        hold_back(now + @backoff.failed(error.retry_after, jitter))
        try_by(now)
      end

      # Nothing is to be asked of the key before that.
      def hold_back(moment)
        @not_before = [@not_before, moment].max
      end

      # Another call of the client reads the key, for all; if that one leaves, this one does.
      def put_off(now, random)
        @doubtful = false
        @poll_at = now + Waiting.poll_delay(random) if @poll_at.finite?
      end

      # A poll was answered with this LockState, by the call or by another that waits for the key. `early`: see Expiry.
      def read(state, now, early, random)
        @trouble = nil
        return try_by(now) unless state.held?

        if @polls
          @poll_at = now + Waiting.poll_delay(random, early)
        elsif !@doubtful # since it began
          @poll_at = Float::INFINITY
        end
      end

      # A poll failed, and the next may do better; or, with `broken_off`, the end of its call's wait came first, which says nothing.
      def not_read(error, now, random, broken_off: false)
        @trouble = error unless broken_off
        hold_back(now + (error.retry_after || 0.0))
        @poll_at = now + Waiting.poll_delay(random)
      end

      # --- what to do ---

      # The next step, if it is time for one: :give_up, :try or :poll. It counts as taken.
      def next_step(now)
        return :give_up if now >= @over_at
        return if now < @not_before

        if now >= @try_at
          @try_at = Float::INFINITY
          :try
        elsif now >= @poll_at
          @poll_at = Float::INFINITY
          @doubtful = false
          :poll
        end
      end

      # Is there a try to make, now or later?
      def to_try?
        @try_at.finite?
      end

      # When there may be a next step; infinite while only an event can tell.
      def wakes_at
        [[@try_at, @poll_at].min, @not_before].max
      end

      private

      def try_by(moment)
        @try_at = [@try_at, moment].min
      end
    end
  end
end

# frozen_string_literal: true

require "volcano/shield"

module Volcano
  # Time, and the only file that touches it: seconds on a clock that nobody sets and that goes on while
  # the host sleeps, and timers on it.
  #
  # CLOCK_BOOTTIME where there is one; else whichever of the monotonic and the wall clock went further,
  # so that a suspend shows (and a wall clock set forward costs a lease, never a lock).
  #
  # All timers of one clock share one thread, which is started by the first and gone a moment after the
  # last. Tests and the conformance driver put a clock with the same four methods in its place.
  # @api private
  class SystemClock
    # The timers' thread looks at the clock this often: its waiting stands still while the host sleeps.
    LOOK_SECONDS = 0.5
    # How long it stays when there is nothing to wait for.
    LINGER_SECONDS = 1.0
    # From so many seconds on the wall clock was set back; less is what passes between two readings.
    STEP_BACK_SECONDS = 1.0

    # One action at one moment. `cancel` is no promise for one whose moment has come.
    class Timer
      attr_reader :at, :number

      def initialize(clock, at, number, action)
        @clock = clock
        @at = at
        @number = number
        @action = action
      end

      def cancel
        @clock.cancel(self)
      end

      def fire
        @action.call
      end

      # Timers are sorted by their moment, then by the order in which they were asked for.
      def before?(other)
        @at < other.at || (@at == other.at && @number < other.number)
      end
    end

    def initialize(boot_time: Process.const_defined?(:CLOCK_BOOTTIME))
      @boot_time = boot_time
      @behind = 0.0
      @wall_offset = wall - monotonic
      @reading = Mutex.new
      @mutex = Mutex.new
      @changed = ConditionVariable.new
      @timers = [] # [Timer, …] sorted
      @numbers = 0
      @thread = nil
    end

    # Seconds since some moment.
    def now
      return Process.clock_gettime(Process::CLOCK_BOOTTIME) if @boot_time

      @reading.synchronize do
        monotonic = self.monotonic
        missed = wall - monotonic - @wall_offset
        if missed > @behind
          @behind = missed
        elsif missed < @behind - STEP_BACK_SECONDS
          @wall_offset -= @behind - missed # or the step back would hide the next suspend
        end
        monotonic + @behind
      end
    end

    # The time of day, in seconds since 1970. For what a server says of its own.
    def wall
      Process.clock_gettime(Process::CLOCK_REALTIME)
    end

    # Is it that late?
    def reached?(moment)
      now >= moment
    end

    # Runs the action at that moment, soon when it has passed, on the timers' thread: it must be short.
    # Raises ThreadError when that thread cannot be started.
    def at(moment, &action)
      Shield.up do
        @mutex.synchronize do
          timer = Timer.new(self, moment, @numbers += 1, action)
          place = place_of(timer)
          @thread = Shield.thread("volcano timers") { run } unless @thread&.alive?
          @timers.insert(place, timer)
          @changed.signal if place.zero?
          timer
        end
      end
    end

    def cancel(timer)
      Shield.up do
        @mutex.synchronize do
          place = place_of(timer)
          @timers.delete_at(place) if @timers[place].equal?(timer)
        end
      end
    end

    private

    def place_of(timer)
      @timers.bsearch_index { |other| !other.before?(timer) } || @timers.size
    end

    def run
      while (timer = next_due)
        timer.fire
      end
    end

    # The next timer that is due, when it is; nil after a while without any.
    def next_due
      @mutex.synchronize do
        leave_at = nil
        loop do
          if (first = @timers.first)
            leave_at = nil
            wait = first.at - now
            return @timers.shift if wait <= 0
          else
            leave_at ||= now + LINGER_SECONDS
            wait = leave_at - now
            return @thread = nil if wait <= 0
          end
          @changed.wait(@mutex, [wait, LOOK_SECONDS].min)
        end
      end
    end

    def monotonic
      Process.clock_gettime(Process::CLOCK_MONOTONIC)
    end
  end
end

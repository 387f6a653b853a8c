# frozen_string_literal: true

# The SDK's seam of time, moved by `advance` alone: conformance/protocol.md, "Virtual time".
class VirtualClock
  # A timer that somebody asked for; `seconds`: how long it was to be.
  class Timer
    attr_reader :at, :seconds

    def initialize(clock, at, action)
      @clock = clock
      @at = at
      @seconds = at - clock.now
      @action = action
    end

    def cancel
      @clock.drop(self)
    end

    def fire
      @clock.drop(self)
      @action.call
    end
  end

  # The timeout of a try is no timer: the exchange looks at the clock. Here its time comes like a timer's.
  Bound = Struct.new(:exchange) do
    def at
      exchange.deadline
    end

    def seconds
      exchange.seconds
    end

    def fire
      exchange.lane&.abort
    end
  end

  attr_reader :now
  # @return [Proc] -> the exchanges in flight
  attr_writer :exchanges

  # @param wall [Time] the time of day at the start
  def initialize(wall)
    @now = 1000.0
    @wall_offset = wall.to_f - @now
    @ran_until = @now
    @timers = [] # [Timer, …] in the order they were asked for
    @mutex = Mutex.new
    @exchanges = -> { [] }
  end

  def wall
    @wall_offset + @now
  end

  # While the process is blocked the time moves on, and nothing notices before it runs again.
  def reached?(moment)
    @ran_until >= moment
  end

  def at(moment, &action)
    timer = Timer.new(self, moment, action)
    @mutex.synchronize { @timers << timer }
    timer
  end

  def drop(timer)
    @mutex.synchronize { @timers.delete(timer) }
  end

  def lengths
    pending.map(&:seconds)
  end

  def jump(seconds)
    @now += seconds
  end

  # Runs what becomes due, each at its moment; yields to wait until all is quiet.
  def advance(seconds)
    finish = (@now + seconds).round(9) # many small steps end where one large one does
    yield
    while (first = pending.select { |one| one.at <= finish }.min_by(&:at))
      @now = [@now, first.at].max
      @ran_until = @now
      first.fire
      yield
    end
    @now = @ran_until = finish
  end

  private

  def pending
    @mutex.synchronize { @timers.dup } + @exchanges.call.map { |exchange| Bound.new(exchange) }
  end
end

# frozen_string_literal: true

# A clock that moves when it is told to; its timers run on the thread that moves it.
class ManualClock
  Timer = Struct.new(:clock, :at, :action) do
    def cancel
      clock.drop(self)
    end
  end

  attr_reader :now

  def initialize(now = 1000.0)
    @now = now
    @timers = []
    @mutex = Mutex.new
  end

  def timers
    @mutex.synchronize { @timers.dup }
  end

  def drop(timer)
    @mutex.synchronize { @timers.delete_if { |other| other.equal?(timer) } }
  end

  def wall
    1_800_000_000.0 + @now
  end

  def reached?(moment)
    @now >= moment
  end

  def at(moment, &action)
    timer = Timer.new(self, moment, action)
    @mutex.synchronize { @timers << timer }
    timer
  end

  # Only the time moves: a process that was stopped.
  def jump(seconds)
    @now += seconds
  end

  def advance(seconds)
    finish = @now + seconds
    while (first = timers.select { |timer| timer.at <= finish }.min_by(&:at))
      @now = [@now, first.at].max
      first.cancel
      first.action.call
    end
    @now = finish
  end
end

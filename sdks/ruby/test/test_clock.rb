# frozen_string_literal: true

require "test_helper"

class TestClock < VolcanoTest
  def test_it_goes_forward_with_and_without_boot_time
    [true, false].each do |boot_time|
      next if boot_time && !Process.const_defined?(:CLOCK_BOOTTIME)

      clock = Volcano::SystemClock.new(boot_time: boot_time)
      before = clock.now
      took = seconds { sleep(0.02) }

      assert_in_delta(took, clock.now - before, 0.05)
    end
  end

  # Where there is no CLOCK_BOOTTIME, a suspend shows as the wall clock going further than the monotonic one.
  def test_without_boot_time_the_larger_of_both_clocks_counts_and_it_never_goes_back
    clock = Volcano::SystemClock.new(boot_time: false)
    wall = 0.0
    clock.define_singleton_method(:wall) { Process.clock_gettime(Process::CLOCK_MONOTONIC) + wall }
    clock.instance_variable_set(:@wall_offset, 0.0)
    start = clock.now

    wall = 3600.0
    assert_in_delta(3600, clock.now - start, 1)
    wall = -3600.0
    assert_in_delta(3600, clock.now - start, 1)
  end

  def test_without_boot_time_a_wall_clock_set_back_hides_no_later_suspend
    clock = Volcano::SystemClock.new(boot_time: false)
    wall = 0.0
    clock.define_singleton_method(:wall) { Process.clock_gettime(Process::CLOCK_MONOTONIC) + wall }
    clock.instance_variable_set(:@wall_offset, 0.0)
    start = clock.now

    wall = -3600.0 # set back by an hour …
    assert_in_delta(0, clock.now - start, 1)
    wall += 20 # … and then the host slept
    assert_in_delta(20, clock.now - start, 1)
    wall -= 7200
    assert_in_delta(20, clock.now - start, 1)
    wall += 40
    assert_in_delta(60, clock.now - start, 1)
  end

  def test_timers_run_in_the_order_of_their_moments_and_then_of_their_asking
    clock = Volcano::SystemClock.new
    fired = Queue.new
    now = clock.now
    clock.at(now + 0.05) { fired << :late }
    clock.at(now + 0.02) { fired << :first }
    clock.at(now + 0.02) { fired << :second }
    cancelled = clock.at(now + 0.01) { fired << :never }
    cancelled.cancel
    cancelled.cancel

    assert_equal(%i[first second late], Array.new(3) { fired.pop })
    assert_operator(clock.now, :>=, now + 0.05)
    assert_empty(fired)
  end

  def test_an_earlier_timer_is_not_late_because_of_a_later_one
    clock = Volcano::SystemClock.new
    fired = Queue.new
    clock.at(clock.now + 60) { fired << :never }
    sleep(0.01)

    took = seconds { [clock.at(clock.now + 0.02) { fired << :now }, fired.pop] }

    assert_in_delta(0.02, took, 0.1)
  end

  def test_the_thread_comes_on_demand_and_goes_and_comes_again
    clock = Volcano::SystemClock.new
    before = Thread.list
    2.times do
      fired = Queue.new
      clock.at(clock.now) { fired << 1 }
      assert_equal(1, fired.pop)
      assert_equal(["volcano timers"], (Thread.list - before).map(&:name))
      wait_until(5, "the thread's end") { (Thread.list - before).empty? }
    end
  end

  def test_ten_thousand_timers_are_no_burden
    clock = Volcano::SystemClock.new
    took = seconds do
      timers = Array.new(10_000) { |number| clock.at(clock.now + 1000 + (number * 7919 % 10_000)) { nil } }
      timers.each(&:cancel)
    end

    assert_operator(took, :<, 3)
  end

  # A thread inherits the shield of its maker, and could then never be ended.
  def test_the_thread_can_be_killed_though_it_was_started_under_the_shield
    clock = Volcano::SystemClock.new
    before = Thread.list
    Volcano::Shield.up { clock.at(clock.now + 60) { nil } }
    thread, = Thread.list - before

    thread.kill

    assert(thread.join(5))
  end
end

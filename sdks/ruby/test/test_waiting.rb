# frozen_string_literal: true

require "test_helper"

class TestWaiting < VolcanoTest
  W = Volcano::Waiting
  NEVER = Float::INFINITY

  def setup
    @turn = W::Turn.new(1060.0)
  end

  # --- what is given ---

  def test_waits_are_judged_as_the_table_says
    table("waits").each do |row|
      wait = row.fetch("wait") { { "Infinity" => Float::INFINITY, "-Infinity" => -Float::INFINITY, "NaN" => Float::NAN }.fetch(row["number"]) }
      if row["valid"]
        assert_equal(wait.to_f, W.checked_wait(wait))
      else
        assert_match(/\Await must be a number of seconds/, assert_raises(ArgumentError, wait.inspect) { W.checked_wait(wait) }.message)
      end
    end
  end

  def test_any_kind_of_real_number_is_a_wait
    assert_equal([0.5, 1e30, Float::INFINITY], [W.checked_wait(1r / 2), W.checked_wait(10**30), W.checked_wait(10**400)])
    [1i, Object.new, :five].each { |wait| assert_raises(ArgumentError) { W.checked_wait(wait) } }
  end

  # --- how long ---

  def test_alone_at_once_and_a_crowd_within_a_second
    assert_equal([0, 0, 0.001, 0.998, 1.0], [[0, 1], [1, 1], [2, 0.5], [500, 1], [100_000, 1]].map { |watchers, random| W.spread(watchers, random).round(6) })
  end

  def test_a_poll_comes_after_one_to_five_seconds_or_when_the_lease_is_over
    assert_equal([1.0, 3.0, 5.0], [0, 0.5, 1].map { |random| W.poll_delay(random) })
    assert_equal([3.0, 1.5], [3.5, 1.5].map { |early| W.poll_delay(0.5, early) })
    assert_equal([61.0, 1.5, 0.1, 0.1], [0, 59.5, 60.95, 3600].map { |wall| W::Expiry.new.early(state(at: 60), at(wall).to_f).round(6) })
    assert_equal(NEVER, W::Expiry.new.early(Volcano::LockState.new(held: false), at(0).to_f))
  end

  # By a clock that is ahead, or a server's that stands still.
  def test_a_lease_that_was_found_to_be_over_is_no_reason_to_hurry_a_second_time
    expiry = W::Expiry.new

    assert_equal([0.1, NEVER, NEVER], [61, 61.1, 3600].map { |wall| expiry.early(state(at: 60), at(wall).to_f) })
    assert_equal([0.1, NEVER], [3600, 3601].map { |wall| expiry.early(state(at: 70), at(wall).to_f) }, "it was renewed")
    assert_equal(0.5, expiry.early(state(at: 3601), at(3601.5).to_f).round(6))
    assert_equal(0.1, expiry.early(state(at: 3601), at(3602).to_f), "that is when it was to be read")
  end

  def test_failures_back_off_and_a_success_begins_anew
    backoff = W::Backoff.new

    assert_equal([0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0], Array.new(8) { backoff.failed(nil, 0) })
    assert_equal([2.5, 7.5, 60.0], [backoff.failed(nil, -1), backoff.failed(nil, 1), backoff.failed(60.0, 0)])
    70.times { backoff.failed(nil, 0) }
    assert_equal(5.0, backoff.failed(1.0, 0))
    backoff.worked
    assert_equal(0.1, backoff.failed(nil, 0))
  end

  # --- one turn ---

  def test_at_first_there_is_nothing_to_do_but_to_wait
    assert_steps([nil, NEVER])
  end

  def test_the_stream_opens_one_more_try
    @turn.uncovered(1000, 0)
    @turn.covered(1000.5, 1)

    assert_steps([:try, NEVER], [nil, NEVER], at: 1000.5)
    @turn.refused(1000.6, 0)
    assert_steps([nil, NEVER], at: 1010)
  end

  def test_what_frees_the_key_is_followed_by_a_try_and_a_grant_is_not
    %i[released force_released lapsed].each do |type|
      @turn.heard(event(type), 1001, 1)
      assert_steps([:try, NEVER], [nil, NEVER], at: 1001)
    end
    @turn.heard(event(:acquired), 1001, 1)
    assert_steps([nil, NEVER], at: 1010)
  end

  def test_in_a_crowd_the_try_comes_at_random
    @turn.heard(event(:released, watchers: 101), 1001, 0.5)

    assert_steps([nil, 1001.1], at: 1001.09)
    assert_steps([:try, NEVER], at: 1001.1)
  end

  # Neither says how many listen: as many as last time.
  def test_a_crowd_is_remembered_for_a_reset_and_a_reconnect
    @turn.heard(event(:acquired, watchers: 101), 1000, 1)
    @turn.heard(Volcano::Events::RESET, 1001, 0.5)
    assert_steps([nil, 1001.1], at: 1001)
    assert_steps([:try, NEVER], at: 1001.1)

    @turn.covered(1002, 1)
    assert_steps([nil, 1002.2], at: 1002)
  end

  def test_the_earlier_of_two_events_counts
    @turn.heard(event(:released, watchers: 101), 1001, 0.5)
    @turn.heard(event(:released, watchers: 101), 1001, 1)
    @turn.heard(event(:released, watchers: 101), 1001, 0.1)

    assert_equal(1001.02, @turn.wakes_at)
  end

  # The answer may be older than the event.
  def test_an_event_during_a_try_is_followed_by_another
    @turn.covered(1000, 0)
    assert_steps([:try, NEVER], at: 1000)
    @turn.heard(event(:released), 1000.1, 0)
    @turn.refused(1000.2, 0)

    assert_steps([:try, NEVER], [nil, NEVER], at: 1000.2)
  end

  def test_without_a_stream_the_key_is_polled
    @turn.uncovered(1000, 0.5)
    assert_steps([nil, 1003], at: 1002.9)
    assert_steps([:poll, NEVER], at: 1003)

    @turn.read(state(at: 60), 1003.1, NEVER, 0.25)
    assert_steps([nil, 1005.1], at: 1005)
    assert_steps([:poll, NEVER], at: 1005.1)

    @turn.read(state(at: 1), 1006, 1.5, 1)
    assert_steps([nil, 1007.5], at: 1007)
  end

  def test_what_a_poll_finds_free_is_tried_and_when_that_fails_polled_again
    @turn.uncovered(1000, 0)
    @turn.next_step(1001)
    @turn.read(Volcano::LockState.new(held: false), 1001, NEVER, 0)
    assert_steps([:try, NEVER], [nil, NEVER], at: 1001)

    @turn.refused(1001.1, 0)
    assert_steps([:poll, NEVER], at: 1002.1)
  end

  def test_a_look_is_owed_still_when_a_poll_before_it_is_answered
    @turn.uncovered(1000, 0)
    assert_steps([:poll, NEVER], at: 1001)
    @turn.covered(1001, 0)
    assert_steps([:try, NEVER], at: 1001)
    @turn.doubtful(1001.5, 0)
    @turn.read(state(at: 60), 1002, NEVER, 0)

    assert_steps([nil, 1002.5], at: 1002)
    assert_steps([:poll, NEVER], at: 1002.5)
    @turn.read(state(at: 60), 1003, NEVER, 0)
    assert_steps([nil, NEVER], at: 1003)
  end

  def test_a_poll_has_two_seconds_and_no_more_than_is_left_of_the_wait
    polls = { [10, 60] => 2.0, [1, 60] => 1, [10, 1.5] => 1.5, [10, -3] => 0.001 }

    assert_equal(polls.values, polls.keys.map { |timeout, left| Volcano::Waiting.poll_timeout(timeout, left) })
  end

  def test_what_is_to_be_left_alone_is_for_as_long_as_anybody_was_told
    @turn.hold_back(1030)
    @turn.not_read(Volcano::Error::TransportError.new("x"), 1000, 0)
    @turn.failed(Volcano::Error::ServerError.new("x"), 1000, 0)

    assert_equal(1030, @turn.not_before)
    assert_steps([nil, 1030], at: 1029)
  end

  def test_a_poll_that_the_end_of_the_wait_broke_off_says_nothing_and_word_of_an_acquisition_that_it_is_held
    error = Volcano::Error::TransportError.new("x")
    @turn.not_read(error, 1000, 0, broken_off: true)
    assert_nil(@turn.trouble)

    @turn.not_read(error, 1000, 0)
    assert_same(error, @turn.trouble)
    @turn.heard(Volcano::LockEvent.new(type: :acquired, key: "k", fencing_token: 7, at: at(0), watchers: 1), 1001, 0)
    assert_nil(@turn.trouble)
  end

  def test_what_another_reads_is_read_later_if_at_all
    @turn.put_off(1000, 0)
    assert_steps([nil, NEVER], at: 1010)

    @turn.uncovered(1010, 0)
    @turn.put_off(1011, 0.5)
    assert_steps([nil, 1014], at: 1011)
    assert_steps([:poll, NEVER], at: 1014)
  end

  def test_a_stream_that_opens_ends_the_polling_also_while_one_is_under_way
    @turn.uncovered(1000, 0)
    @turn.next_step(1001)
    @turn.covered(1001.1, 0)
    @turn.read(state(at: 60), 1001.2, NEVER, 0)

    assert_steps([:try, NEVER], [nil, NEVER], at: 1001.2)
  end

  def test_a_key_whose_stream_was_replaced_is_looked_at_once
    @turn.doubtful(1000, 0.5)
    @turn.doubtful(1002, 1)

    assert_steps([:poll, NEVER], at: 1003)
    @turn.not_read(Volcano::Error::TransportError.new("x"), 1003, 0)
    assert_steps([:poll, NEVER], at: 1004)
    @turn.read(state(at: 60), 1004, NEVER, 0)
    assert_steps([nil, NEVER], at: 1059)
  end

  def test_what_that_look_finds_free_is_tried
    @turn.doubtful(1000, 0)
    @turn.next_step(1001)
    @turn.read(Volcano::LockState.new(held: false), 1001, NEVER, 0)

    assert_steps([:try, NEVER], at: 1001)
  end

  def test_a_poll_that_fails_is_followed_by_the_next_not_before_retry_after
    @turn.uncovered(1000, 0)
    @turn.next_step(1001)
    @turn.not_read(Volcano::Error::TransportError.new("x"), 1001, 0.5)
    assert_steps([nil, 1004], at: 1003)

    @turn.next_step(1004)
    @turn.not_read(Volcano::Error::RateLimitedError.new("x", retry_after: 20.0), 1004, 0)
    assert_steps([nil, 1024], at: 1023)
    assert_steps([:poll, NEVER], at: 1024)
  end

  def test_a_try_that_fails_is_repeated_later_and_later
    error = Volcano::Error::ServerError.new("x", status: 503)
    @turn.failed(error, 1000, 0)
    assert_steps([nil, 1000.1], at: 1000.05)
    assert_steps([:try, NEVER], at: 1000.1)

    @turn.failed(error, 1000.1, 1)
    assert_in_delta(1000.4, @turn.wakes_at)
  end

  def test_nothing_is_sent_before_retry_after_whatever_happens
    @turn.failed(Volcano::Error::RateLimitedError.new("x", retry_after: 30.0), 1000, 0)
    @turn.heard(event(:released), 1001, 0)
    @turn.covered(1002, 0)

    assert_steps([nil, 1030], at: 1029.9)
    assert_equal(:try, @turn.next_step(1030))
  end

  def test_an_answer_ends_the_row_of_failures
    2.times { @turn.failed(Volcano::Error::TransportError.new("x"), 1000, 0) }
    @turn.refused(1001, 0)
    @turn.failed(Volcano::Error::TransportError.new("x"), 1002, 0)

    assert_in_delta(1002.1, @turn.wakes_at)
  end

  def test_when_the_time_is_over_nothing_else_is_done
    @turn.heard(event(:released), 1059, 0)

    assert_equal(:give_up, @turn.next_step(1060))
    assert_nil(W::Turn.new(Float::INFINITY).next_step(1e12))
  end

  private

  # What it does at that moment, step by step, and when it would go on.
  def assert_steps(*wanted, at: 1000)
    wanted.each do |step, wakes_at|
      assert_equal([step], [@turn.next_step(at)])
      wakes_at.finite? ? assert_in_delta(wakes_at, @turn.wakes_at) : assert_equal(wakes_at, @turn.wakes_at)
    end
  end

  def event(type, watchers: 1)
    Volcano::LockEvent.new(type: type, key: "k", fencing_token: 7, at: at(0), watchers: watchers)
  end

  # A time of day, and a lease that ends then.
  def at(seconds)
    Time.at(1_800_000_000 + seconds, in: "UTC")
  end

  def state(at:)
    Volcano::LockState.new(held: true, expires_at: at(at), fencing_token: 7)
  end
end

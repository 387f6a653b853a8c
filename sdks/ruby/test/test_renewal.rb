# frozen_string_literal: true

require "test_helper"

class TestRenewal < VolcanoTest
  R = Volcano::Renewal
  O = Volcano::Operations
  EXPIRES_AT = Time.utc(2026, 11, 29, 12)

  def test_delays_are_those_of_the_tables
    table("renewal_delay").each do |row|
      assert_in_delta(row["seconds"], R.renewal_delay(row["ttl"], row["remaining"], row["jitter"]), 1e-6, row)
    end
    table("retry_delay").each do |row|
      assert_in_delta(row["seconds"], R.retry_delay(row["ttl"], row["failures"], row["remaining"], row["jitter"]), 1e-6, row)
    end
    table("try_timeout").each do |row|
      assert_in_delta(row["seconds"], R.try_timeout(row["remaining"], row["client_timeout"]), 1e-6, row)
    end
    table("stop_time").each do |row|
      margin = trust(row["ttl"]).then { |trust| trust.deadline - trust.stop_at }
      assert_in_delta(row["seconds"], row["ttl"] - margin, 1e-3, row)
    end
  end

  def test_trust_counts_from_the_send_and_from_what_the_server_left
    assert_equal(130.0, trust(30).deadline)
    assert_equal(112.5, trust(30, expires_in: 12.5).deadline)
    assert_equal(130.0, trust(30, expires_in: 60.0).deadline)
  end

  def test_a_late_answer_never_takes_trust_away
    later = trust(30).answered(grant(sent_at: 110.0))

    assert_equal(140.0, later.deadline)
    assert_equal(140.0, later.answered(grant(sent_at: 105.0)).deadline)
    assert_equal(140.0, later.answered(grant(sent_at: 120.0, expires_in: 5.0)).deadline)
  end

  def test_a_shorter_ttl_counts_from_its_send
    shorter = trust(30).sent(110.0, 5)

    assert_equal([115.0, 5], [shorter.deadline, shorter.ttl])
    assert_equal(125.0, shorter.answered(grant(sent_at: 120.0)).deadline)
    assert_equal([130.0, 30], trust(30).sent(120.0, 60).then { |longer| [longer.deadline, longer.ttl] })
  end

  # Or a lost answer of that direct call would leave no renewal before the stop time.
  def test_a_shorter_ttl_that_crosses_brings_the_next_renewal_forward
    held = holding
    held.sent(105.0, 6)

    assert_equal(107.0, held.schedule.due_at)
    assert_equal(110.0, held.trust.stop_at)
    held.sent(106.0, 6)
    held.sent(106.0, 60)
    assert_equal(107.0, held.schedule.due_at)
  end

  def test_a_shorter_ttl_never_puts_a_renewal_back
    held = holding
    held.sent(109.9, 29)

    assert_equal(110.0, held.schedule.due_at)
  end

  def test_nothing_is_trusted_past_the_hard_deadline
    day70 = trust(7_776_000).answered(grant(sent_at: 100.0 + 70 * 86_400))

    assert_in_delta(100.0 + 89.91 * 86_400, day70.deadline, 1e-6)
  end

  def test_a_refused_renewal_is_a_loss_with_its_cause
    [400, 401, 403, 404, 409].each do |status|
      held = holding

      held.renewed(request, refusal(status), now: 110.0, jitter: 0)

      assert_instance_of(Volcano::Error::LockLostError, held.loss)
      assert_equal([status, "why"], [held.loss.status, held.loss.code])
      assert_equal(status, held.loss.cause.status)
    end
  end

  def test_what_passes_is_tried_again_sooner_and_sooner_less_often
    held = holding
    delays = [500, 503, 429, 418, 302].map do |status|
      held.renewed(request, refusal(status, sent_at: 110.0), now: 110.0, jitter: 0)
      (held.schedule.due_at - 110.0).round(6)
    end

    assert_equal([0.1, 0.2, 0.4, 0.8, 1.6], delays)
    assert_nil(held.loss)
    held.renewed(request, good(sent_at: 112.0), now: 112.1, jitter: 0)
    assert_equal([0, 122.0], [held.schedule.failures, held.schedule.due_at])
  end

  def test_a_renewal_that_returns_another_fencing_token_is_a_loss
    held = holding

    held.renewed(request, good(fencing_token: 8), now: 110.0, jitter: 0)

    assert_match(/now has the fencing token 8/, held.loss.message)
    assert_equal(7, held.lease.fencing_token)
  end

  def test_a_server_that_wants_us_back_too_late_gets_one_last_try
    held = holding
    held.renewed(request, refusal(429, sent_at: 110.0, retry_after: "60"), now: 110.0, jitter: 0)

    assert_equal([119.5, true], [held.schedule.due_at, held.schedule.is_last])
    held.renewed(request, refusal(429, sent_at: 119.5, retry_after: "1"), now: 119.5, jitter: 0)
    assert_predicate(held.schedule.due_at, :infinite?)
  end

  def test_a_loss_by_the_clock_tells_what_failed_last_and_comes_once
    held = holding
    held.renewed(request, refusal(503, sent_at: 110.0), now: 110.0, jitter: 0)

    assert_nil(held.look(128.9))
    loss = held.look(129.0)

    assert_equal(503, loss.cause.status)
    held.renewed(request, good(sent_at: 128.0), now: 129.5, jitter: 0)
    assert_same(loss, held.look(100.0))
    refute_predicate(held, :live?)
  end

  # Due at 110: half a second earlier it may share a request, after a failure not a moment earlier.
  def test_a_renewal_is_brought_forward_by_half_a_second_and_a_retry_not_at_all
    held = holding

    assert_equal([false, true, true], ([109.49, 109.5, 110.0].map { |now| held.may_join?(now) }))
    held.renewed(request, refusal(503, sent_at: 110.0), now: 110.0, jitter: 0)
    assert_equal([false, true], ([110.09, 110.11].map { |now| held.may_join?(now) }))
    held.ended = true
    refute(held.may_join?(111.0))
    assert_equal([0.2, 0.5, 0.5], ([6, 15, 900].map { |ttl| R.leeway(ttl) }))
  end

  def test_after_its_end_a_lock_is_never_lost
    held = holding
    held.ended = true

    held.renewed(request, refusal(409), now: 110.0, jitter: 0)

    assert_nil(held.look(500.0))
    assert_instance_of(Volcano::Error::LockLostError, held.release_refused(Volcano::Error::ConflictError.new("x", status: 409)))
  end

  TTLS = [5, 6, 8, 15, 20, 30, 60].freeze
  KINDS = %i[hang reset refuse mixed].freeze

  def test_two_thousand_leases_survive_an_outage_at_a_random_moment
    random = Random.new(20_261_129)
    lost = Array.new(2000) { |number| survive(TTLS[number % TTLS.size], KINDS[number % KINDS.size], random) }.compact

    assert_empty(lost)
  end

  def test_an_outage_of_more_than_the_ttl_is_a_loss
    assert(survive(5, :hang, Random.new(1), outage: 6.0))
  end

  private

  # One lease through five TTLs with one outage: nil, or when it was lost.
  def survive(ttl, kind, random, outage: ttl >= 15 ? ttl / 2.0 : ttl / 3.0)
    down_at = random.rand(0.0..(2.0 * ttl))
    now = 0.0
    held = R::Holding.new("k", TOKEN, ttl, O::Acquired.new(grant: grant(sent_at: 0.0), first_sent_at: 0.0), jitter: random.rand(-1.0..1.0))
    while now < 5 * ttl
      now = [held.schedule.due_at, now].max
      return now if held.look(now)

      attempt = held.renewal(request, now, 10.0)
      sent_at = now
      down = now >= down_at && now < down_at + outage
      hangs = down && (kind == :hang || (kind == :mixed && random.rand < 0.5))
      now += hangs ? attempt.timeout : 0.01
      outcome = down ? failure(sent_at) : good(sent_at: sent_at)
      held.renewed(request, outcome, now: now, jitter: random.rand(-1.0..1.0))
    end
    held.loss && now
  end

  def grant(sent_at: 100.0, expires_in: nil, fencing_token: 7)
    O::Grant.new(sent_at: sent_at, expires_at: EXPIRES_AT, fencing_token: fencing_token, expires_in: expires_in)
  end

  def trust(ttl, expires_in: nil)
    R::Trust.begun(O::Acquired.new(grant: grant(expires_in: expires_in), first_sent_at: 100.0), ttl)
  end

  def holding
    R::Holding.new("k", TOKEN, 30, O::Acquired.new(grant: grant, first_sent_at: 100.0), jitter: 0)
  end

  def request
    @request ||= O.renew("k", ttl: 30, token: TOKEN, request_id: TOKEN, service_key: "sk-test")
  end

  def good(sent_at: 110.0, fencing_token: 7)
    body = JSON.generate(expires_at: "2026-11-29T12:00:00Z", fencing_token: fencing_token)
    O::Answer.new(sent_at: sent_at, status: 200, headers: {}, body: body)
  end

  def refusal(status, sent_at: 110.0, retry_after: nil)
    headers = { "retry-after" => retry_after }.compact
    O::Answer.new(sent_at: sent_at, status: status, headers: headers, body: JSON.generate(error: "No.", code: "why"))
  end

  def failure(sent_at)
    O::Failure.new(sent_at: sent_at, error: Volcano::Error::TransportError.new("away"), reached: true)
  end
end

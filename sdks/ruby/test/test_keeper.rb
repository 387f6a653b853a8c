# frozen_string_literal: true

require "test_helper"

# Renewals that share a request. What a single one does is in test_guard.rb and the conformance suite.
class TestKeeper < VolcanoTest
  O = Volcano::Operations

  def setup
    @clock = ManualClock.new
    @script = :be_good.to_proc
    @server = ScriptedServer.open { |request| @script.call(request) }
    @client = client(@server.url, clock: @clock)
    @holders = {}
    @guards = {}
    @leave = {}
  end

  def teardown
    super
    @holders.each_value(&:kill)
    @server.close
  end

  def test_renewals_that_are_due_together_travel_in_one_request
    hold("a", ttl: 30)
    hold("b", ttl: 31)
    hold("c", ttl: 29)
    tokens = @guards.transform_values { |guard| guard.lease.token }

    renew_all(after: 12)

    assert_equal(%w[renew_many], renewals.map(&:operation))
    request = renewals.first
    expected = { "a" => 30, "b" => 31, "c" => 29 }.map { |key, ttl| { "key" => key, "token" => tokens[key], "ttl_seconds" => ttl } }
    assert_equal(expected, request.leases.sort_by { |lease| lease["key"] })
    assert_equal("PATCH", request.http_method)
    assert_equal("Bearer sk-test", request.headers["authorization"])
    refute_includes(request.headers.keys, "x-volcano-lock-token")
    assert_match(/\A\h{8}-/, request.headers["x-volcano-request-id"])
  end

  def test_each_renewal_request_has_an_id_of_its_own_and_its_leases_a_schedule_of_their_own
    hold("a", ttl: 30)
    hold("b", ttl: 30)

    3.times { renew_all(after: 12) }

    assert_equal(3, renewals.map { |request| request.headers["x-volcano-request-id"] }.uniq.size)
    due = @clock.timers.map(&:at).sort.first(2)
    due.each { |moment| assert_includes(9.0..11.0, moment - 1036.0) }
    refute_equal(*due)
  end

  def test_a_lock_that_is_due_alone_uses_the_single_route
    hold("a", ttl: 30)
    @clock.jump(6)
    hold("b", ttl: 30)

    renew_all("a", after: 6)

    assert_equal([%w[renew a]], (renewals.map { |request| [request.operation, request.key] }))
  end

  def test_one_that_is_refused_is_lost_alone_and_with_its_cause
    hold_three
    @script = ->(request) { each_but(request, "b") { { code: "lock_ownership_lost", error: "Gone." } } }

    renew_all("a", "c", after: 12)

    loss = assert_raises(Volcano::Error::LockLostError) { @guards["b"].check! }
    assert_equal([409, "lock_ownership_lost", "Gone."], [loss.status, loss.code, loss.cause.message])
    assert_equal(renewals.first.headers["x-volcano-request-id"], loss.request_id)
    refute(@guards.values_at("a", "c").any?(&:lost?))
  end

  def test_one_that_has_another_fencing_token_is_lost_alone
    hold_three
    @script = ->(request) { each_but(request, "b") { { fencing_token: 8 } } }

    renew_all("a", "c", after: 12)

    assert_raises(Volcano::Error::LockLostError) { @guards["b"].check! }
    refute(@guards.values_at("a", "c").any?(&:lost?))
  end

  def test_one_that_is_over_the_quota_is_tried_again_when_the_server_said
    hold_three
    limited = -> { { code: "lock_rate_limited", error: "Later.", retry_after: 7 } }
    @script = ->(request) { each_but(request, "b", &limited) }

    renew_all("a", "c", after: 12)
    wait_until { @clock.timers.map(&:at).include?(1019.0) }
    @clock.advance(6.9)
    assert_equal(%w[renew_many], renewals.map(&:operation))
    renew_all("b", after: 0.1)

    assert_equal(["renew", "b"], [renewals.last.operation, renewals.last.key])
    refute(@guards.values.any?(&:lost?))
  end

  # Also a 409, which is final for one lease but says nothing of many.
  def test_what_goes_wrong_in_transit_is_transient_for_all
    answers = {
      reset: ->(request) { request.reset },
      unavailable: ->(request) { request.refuse(503, "lock_service_unavailable") },
      conflict: ->(request) { request.refuse(409, "lock_ownership_lost") },
      limited: ->(request) { request.refuse(429, "lock_rate_limited", retry_after: 1) },
      moved: ->(request) { request.answer(302, "") },
      junk: ->(request) { request.answer(200, "junk") },
      single: ->(request) { request.grant },
      fewer: ->(request) { request.answer(200, { leases: [] }) },
      others: ->(request) { request.grant_each { |lease| { key: "#{lease["key"]}x" } } },
      nameless: ->(request) { request.grant_each { { key: nil } } },
      numbers: ->(request) { request.answer(200, { leases: [1, 2, 3] }) },
      unknown: ->(request) { request.grant_each { { code: "what_is_this", error: "?" } } }
    }
    hold_three
    renew_all(after: 12)
    answers.each do |name, answer|
      before = renewals.size
      @script = ->(request) { renewals.size == before + 1 ? answer.call(request) : request.be_good }

      renew_all(after: 12) { @clock.advance(0.1) if exchanges.empty? }

      assert_equal("renew_many", renewals[before].operation, name)
      assert_operator(renewals.size, :>, before + 1, name)
      refute(@guards.values.any?(&:lost?), name)
    end
  end

  def test_a_whole_that_is_refused_for_the_credential_is_final_for_all
    [401, 403].each do |status|
      hold("a#{status}", ttl: 30)
      hold("b#{status}", ttl: 30)
      @script = ->(request) { request.operation == "renew_many" ? request.refuse(status, "permission_denied") : request.be_good }

      @clock.jump(12)
      @clock.advance(0)

      wait_until { @guards.values.all?(&:lost?) }
      assert_equal(status, assert_raises(Volcano::Error::LockLostError) { @guards["a#{status}"].check! }.status)
    end
    assert_equal(%w[renew_many renew_many], renewals.map(&:operation))
  end

  def test_a_whole_that_is_wrong_or_too_large_is_sent_singly_this_time
    [400, 413].each do |status|
      hold_three("-#{status}")
      before = renewals.size
      @script = ->(request) { request.operation == "renew_many" ? request.refuse(status, "invalid_request") : request.be_good }
      renew_all(after: 12)

      assert_equal(["renew_many"] + (["renew"] * @guards.size), renewals.drop(before).map(&:operation))
      assert_equal(@guards.keys.sort, renewals.drop(before + 1).map(&:key).sort)
      @script = :be_good.to_proc
      renew_all(after: 12)
      assert_equal("renew_many", renewals.last.operation)
    end
  end

  def test_a_server_without_it_is_found_out_once
    [404, 405].each do |status|
      @client = client(@server.url, clock: @clock)
      hold_three("-#{status}")
      before = renewals.size
      @script = ->(request) { request.operation == "renew_many" ? request.refuse(status, "not_found") : request.be_good }

      renew_all("a-#{status}", "b-#{status}", "c-#{status}", after: 12)
      @script = :be_good.to_proc
      @leave.each_key { |key| leave(key) unless key.end_with?("-#{status}") }
      renew_all("a-#{status}", "b-#{status}", "c-#{status}", after: 12)

      assert_equal(["renew_many"] + (["renew"] * 6), renewals.drop(before).map(&:operation))
      leave("a-#{status}", "b-#{status}", "c-#{status}")
    end
  end

  def test_what_is_said_of_a_lock_that_has_ended_is_nobodys
    hold_three
    go = Queue.new
    @script = lambda do |request|
      next request.be_good unless request.operation == "renew_many"

      go.pop
      each_but(request, "b") { { code: "lock_ownership_lost", error: "Gone." } }
    end
    @clock.jump(12)
    @clock.advance(0)
    wait_until { renewals.size == 1 }

    assert_equal("done", leave("b"))
    go << 1
    wait_until { @client.session.transports.flat_map(&:exchanges).empty? }
    refute_predicate(@guards["b"], :lost?)
  end

  def test_a_request_takes_no_longer_than_the_lease_with_least_left_allows
    hold("slow", ttl: 900)
    @clock.jump(328.1)
    hold("quick", ttl: 5)
    @script = ->(request) { request.operation == "renew_many" ? request.hang : request.be_good }
    @clock.jump(1.9)
    wait_until do
      @clock.advance(0) # what was not due yet when the time went on comes due here
      renewals.size == 1
    end

    exchange, = exchanges
    assert_in_delta(0.7, exchange.seconds, 1e-6)
    assert_equal(%w[quick slow], renewals.first.leases.map { |lease| lease["key"] }.sort)
    @script = :be_good.to_proc
    renew_all(after: 0.7) { @clock.advance(0) }
    refute_predicate(exchange.lane, :open?)
  end

  def test_a_grant_that_comes_while_its_client_closes_is_lost_and_given_back
    @script = lambda do |request|
      @client.session.keeper.lose_all("was lost: its client was closed") if request.operation == "acquire"
      request.be_good
    end

    error = assert_raises(Volcano::Error::LockLostError) { @client.locks.with_lock("a", ttl: 30) { flunk("the block must not start") } }

    assert_match(/its client was closed/, error.message)
    assert_equal(%w[acquire release], @server.operations)
  end

  def test_no_more_than_five_hundred_share_a_request
    fibers = Array.new(501) { |number| Fiber.new { @client.locks.with_lock("k#{number}", ttl: 30) { Fiber.yield } }.tap(&:resume) }
    @clock.jump(12)
    @clock.advance(0)
    wait_until { renewals.size == 2 }

    sizes = renewals.map { |request| request.operation == "renew" ? 1 : request.leases.size }
    assert_equal([1, 500], sizes.sort)
    assert_operator(renewals.map { |request| request.body.bytesize }.max + (500 * 125), :<, 128 * 1024, "with keys of 128 characters")
    fibers.each(&:resume)
  end

  private

  def renewals
    @server.requests.select { |request| request.operation.start_with?("renew") }
  end

  def exchanges
    @client.session.transports.flat_map(&:exchanges)
  end

  def hold_three(suffix = "")
    %w[a b c].each { |key| hold("#{key}#{suffix}", ttl: 30) }
  end

  # Holds a lock on a thread of its own until `leave`.
  def hold(key, ttl:)
    entered = Queue.new
    @leave[key] = Queue.new
    @holders[key] = Thread.new do
      Thread.current.report_on_exception = false
      @client.locks.with_lock(key, ttl: ttl) { |guard| [entered << guard, @leave[key].pop].last }
    end
    @guards[key] = entered.pop
  end

  def leave(*keys)
    keys.map do |key|
      @leave.delete(key) << "done"
      @holders.delete(key).value
    end.last
  end

  # Lets so much time pass at once, and waits until all of these (all there are, unless named) were renewed.
  def renew_all(*keys, after:)
    guards = keys.empty? ? @guards.values : @guards.values_at(*keys)
    before = guards.to_h { |guard| [guard, guard.lease] }
    @clock.jump(after)
    @clock.advance(0)
    wait_until do
      yield if block_given?
      before.none? { |guard, lease| guard.lease.equal?(lease) }
    end
  end

  def each_but(request, key)
    request.operation == "renew_many" ? request.grant_each { |lease| yield if lease["key"] == key } : request.be_good
  end
end

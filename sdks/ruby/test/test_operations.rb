# frozen_string_literal: true

require "test_helper"

class TestOperations < VolcanoTest
  O = Volcano::Operations
  IDS = { token: TOKEN, request_id: "5b0d0f8c-63f3-4ed8-9f0b-0d2d0a5a8e11", service_key: "sk-test" }.freeze

  def test_keys_are_judged_as_the_table_says
    table("keys").select { |row| row.key?("key") }.each do |row|
      key = row["key"]
      if row["valid"]
        assert_equal(key, O.checked_key(key))
        assert_equal("/locks/#{row["segment"]}", O.get(key, **IDS.except(:token)).path)
      else
        error = assert_raises(ArgumentError, key.inspect) { O.checked_key(key) }
        assert_match(/key must be 1 to 128 characters/, error.message)
      end
    end
  end

  def test_keys_may_come_in_any_encoding_but_are_judged_by_their_bytes
    assert_equal("nightly", O.checked_key("nightly".b))
    assert_equal(Encoding::UTF_8, O.checked_key("nightly".dup.force_encoding("US-ASCII")).encoding)
    assert_predicate(O.checked_key("nightly".b), :frozen?)
    [nil, :nightly, 7, "\xFF", "\xFFa".b, "a\xFF", "nightly".encode("UTF-16LE"), "\x00"].each do |key|
      assert_raises(ArgumentError, key.inspect) { O.checked_key(key) }
    end
  end

  def test_ttls_are_judged_as_the_table_says
    table("ttls").select { |row| row.key?("ttl") }.each do |row|
      ttl = row["ttl"]
      if row["valid"]
        assert_equal(%({"ttl_seconds":#{ttl}}), O.acquire("k", ttl: O.checked_ttl(ttl), **IDS).body)
      else
        assert_raises(ArgumentError, ttl.inspect) { O.checked_ttl(ttl) }
      end
    end
    [30.0, Float::NAN, Float::INFINITY, 30r, Object.new].each { |ttl| assert_raises(ArgumentError) { O.checked_ttl(ttl) } }
  end

  def test_a_token_is_a_uuid_in_any_case_and_never_shown
    assert_equal(TOKEN, O.checked_token(TOKEN.upcase))
    ["secret", "#{TOKEN}\n", TOKEN.tr("-", ""), nil, 5].each do |token|
      error = assert_raises(ArgumentError) { O.checked_token(token) }
      refute_match(/secret/, error.message)
    end
  end

  def test_a_request_id_is_a_uuid_and_shown
    error = assert_raises(ArgumentError) { O.checked_request_id("17") }
    assert_match(/request_id must be a UUID; got "17"/, error.message)
  end

  def test_many_renewals_are_one_request_with_the_tokens_in_its_body
    request = renew_many("a:1", "b")

    assert_equal(["PATCH", "/lock-leases"], [request.http_method, request.path])
    lease = { "token" => TOKEN, "ttl_seconds" => 30 }
    assert_equal({ "leases" => [{ "key" => "a:1", **lease }, { "key" => "b", **lease }] }, JSON.parse(request.body))
    assert_equal(%w[Authorization Content-Type X-Volcano-Request-Id], request.headers.keys)
    refute_match(/#{TOKEN}|sk-test/, request.inspect)
  end

  def test_each_answer_among_many_is_read_like_that_of_one_renewal
    good = { key: "a", expires_at: "2026-11-29T12:00:00Z", fencing_token: 7 }
    rows = {
      { **good, expires_in: 29.5 } => 29.5,
      { **good, expires_in: 29.9999 } => 29.999,
      { **good, expires_in: 30 } => 30.0,
      { **good, expires_in: 0.00001 } => 0.0,
      { **good, expires_in: -1 } => nil,
      { **good, expires_in: "29" } => nil,
      good => nil
    }
    assert_equal(rows.values, rows.keys.map { |item| granted_among(item).expires_in })
    assert_equal([7, 100.0, Time.utc(2026, 11, 29, 12)], granted_among(good).to_h.values_at(:fencing_token, :sent_at, :expires_at))
  end

  def test_each_refusal_among_many_is_the_error_that_it_is_alone
    table("error_names").reject { |row| [404, 500, 502, 504].include?(row["status"]) }.each do |row|
      error = assert_raises(Volcano::Error, row) { granted_among(key: "a", code: row["code"], error: "No.", retry_after: 3) }
      assert_equal([row["error"], row["status"], row["code"], 3.0], [error.class.name.split("::").last, error.status, error.code, error.retry_after])
    end
    [-5, 1.5, "3", nil].each do |retry_after|
      assert_nil(assert_raises(Volcano::Error) { granted_among(key: "a", code: "lock_rate_limited", error: "No.", retry_after: retry_after) }.retry_after)
    end
    ["new_code", 5, nil].each do |code|
      error = assert_raises(Volcano::Error::ServerError) { granted_among(key: "a", code: code, error: "?", expires_at: "2026-11-29T12:00:00Z", fencing_token: 7) }
      assert_equal(200, error.status)
    end
  end

  def test_a_lease_must_be_one_and_of_this_key
    lease = Volcano::LockLease.new(key: "a", token: TOKEN, expires_at: Time.now, fencing_token: 1)

    assert_same(lease, O.checked_lease("a", lease))
    assert_match(/a lease of "a", not of "b"/, assert_raises(ArgumentError) { O.checked_lease("b", lease) }.message)
    assert_match(/got a Hash/, assert_raises(ArgumentError) { O.checked_lease("a", {}) }.message)
  end

  def test_each_request_is_what_the_protocol_says
    acquire = O.acquire("a:b", ttl: 30, **IDS)
    release = O.release("a:b", **IDS)
    get = O.get("a:b", **IDS.except(:token))

    assert_equal(["POST", "/locks/a%3Ab/lease", %({"ttl_seconds":30})], [acquire.http_method, acquire.path, acquire.body])
    assert_equal(
      { "Authorization" => "Bearer sk-test", "Content-Type" => "application/json", "X-Volcano-Request-Id" => IDS[:request_id],
        "X-Volcano-Lock-Token" => TOKEN },
      acquire.headers
    )
    assert_equal(["PATCH", "/locks/a%3Ab/lease"], O.renew("a:b", ttl: 30, **IDS).then { |one| [one.http_method, one.path] })
    assert_equal(["DELETE", "/locks/a%3Ab/lease", nil], [release.http_method, release.path, release.body])
    assert_equal(["GET", "/locks/a%3Ab", nil], [get.http_method, get.path, get.body])
    refute_includes(get.headers, "X-Volcano-Lock-Token")
    assert_equal(["DELETE", "/locks/a%3Ab"], O.force_release("a:b", **IDS.except(:token)).then { |one| [one.http_method, one.path] })
    assert_predicate(acquire, :frozen?)
    refute_match(/#{TOKEN}|sk-test/, acquire.inspect)
  end

  def test_errors_have_the_names_of_the_table
    table("error_names").each do |row|
      problem = O.problem(O.get("k", **IDS.except(:token)), answer(row["status"], { error: "Why.", code: row["code"] }))

      assert_instance_of(Volcano::Error.const_get(row["error"]), problem)
      assert_equal([row["status"], row["code"], "Why.", IDS[:request_id]], [problem.status, problem.code, problem.message, problem.request_id])
    end
    assert_instance_of(Volcano::Error, O.problem(O.get("k", **IDS.except(:token)), answer(418, {})))
  end

  def test_what_is_no_lock_servers_body_is_not_quoted
    ["<html>", "[]", "{}", %({"error": 5, "code": "x"}), "", nil, "\xFF".b, "[" * 200].each do |body|
      problem = O.problem(O.get("k", **IDS.except(:token)), answer(502, body))

      assert_equal("get was answered 502 without an explanation", problem.message, body.inspect)
      assert_nil(problem.code)
    end
  end

  def test_retry_after_is_read_as_the_table_says
    table("retry_after").each do |row|
      expected = row["seconds"]
      actual = O.retry_after(row["header"], "Sun, 29 Nov 2026 12:00:00 GMT")
      expected ? assert_equal(expected, actual, row["header"]) : assert_nil(actual, row["header"])
    end
    assert_equal(30.0, O.retry_after("Sun, 29 Nov 2026 12:00:30 GMT", "Sun, 29 Nov 2026 12:00:00 GMT"))
    assert_nil(O.retry_after("Sun, 29 Nov 2026 12:00:30 GMT"))
  end

  def test_a_grant_is_read_whole_or_not_at_all
    request = O.acquire("k", ttl: 30, **IDS)
    good = { expires_at: "2026-11-29T12:00:00.250Z", fencing_token: (2**53) - 1 }

    grant = O.granted(request, answer(201, good, "x-volcano-expires-in" => "29.500"))

    assert_equal([Time.utc(2026, 11, 29, 12, 0, 0.25r), (2**53) - 1, 29.5, 5.0], [grant.expires_at, grant.fencing_token, grant.expires_in, grant.sent_at])
    assert_nil(O.granted(request, answer(201, good, "x-volcano-expires-in" => "soon")).expires_in)
    assert_equal(Time.utc(2026, 11, 29, 10), O.granted(request, answer(201, { **good, expires_at: "2026-11-29T12:00:00+02:00" })).expires_at)
    [
      "", "{", "[]", "null", "\xFF".b, {}, good.except(:fencing_token), { **good, fencing_token: "7" }, { **good, fencing_token: 7.0 },
      { **good, fencing_token: true }, { **good, fencing_token: -1 }, { **good, fencing_token: 2**53 }, { **good, expires_at: nil },
      { **good, expires_at: 5 }, { **good, expires_at: "tomorrow" }, { **good, expires_at: "2026-11-29T12:00:00" }, { **good, expires_at: "2026-99-99T12:00:00Z" }
    ].each do |body|
      error = assert_raises(Volcano::Error::ServerError, body.inspect) { O.granted(request, answer(201, body)) }
      assert_equal(201, error.status)
      assert_nil(error.cause)
    end
    assert_raises(Volcano::Error) { O.granted(request, answer(200, good)) }
  end

  def test_a_state_is_held_or_free
    request = O.get("k", **IDS.except(:token))

    assert_equal(Volcano::LockState.new(held: false), O.state(request, answer(200, { held: false })))
    held = O.state(request, answer(200, { held: true, expires_at: "2026-11-29T12:00:00Z", fencing_token: 7 }))
    assert_equal([true, 7, Time.utc(2026, 11, 29, 12)], [held.held?, held.fencing_token, held.expires_at])
    [{}, { held: 1 }, { held: nil }, { held: true }].each do |body|
      assert_raises(Volcano::Error::ServerError) { O.state(request, answer(200, body)) }
    end
  end

  # outcomes in order -> [tries, result, unknown?]
  ACQUIRES = {
    %i[granted] => [1, :acquired, false],
    %i[lost granted] => [2, :acquired, false],
    %i[lost lost] => [2, Volcano::Error::TransportError, true],
    %i[unreached unreached] => [2, Volcano::Error::TransportError, false],
    %i[unreached lost] => [2, Volcano::Error::TransportError, true],
    %i[lost unreached] => [2, Volcano::Error::TransportError, true],
    %i[lost held] => [2, Volcano::Error::ConflictError, false],
    %i[lost limited] => [2, Volcano::Error::RateLimitedError, true],
    %i[busy granted] => [2, :acquired, false],
    %i[busy busy] => [2, Volcano::Error::ServerError, true],
    %i[busy held] => [2, Volcano::Error::ConflictError, false],
    %i[broken] => [1, Volcano::Error::ServerError, true],
    %i[junk] => [1, Volcano::Error::ServerError, true],
    %i[held] => [1, Volcano::Error::ConflictError, false],
    %i[limited] => [1, Volcano::Error::RateLimitedError, false],
    %i[teapot] => [1, Volcano::Error, false]
  }.freeze

  def test_an_acquire_takes_two_tries_at_most_and_knows_what_it_does_not_know
    ACQUIRES.each do |names, (tries, result, unknown)|
      flow = O::AcquireFlow.new(O.acquire("k", ttl: 30, **IDS), ttl: 30, timeout: 10.0)
      left = names.dup
      flow.take(outcome(left.shift)) while flow.next_try

      assert_empty(left, names)
      assert_equal(tries, names.size)
      assert_equal(unknown, flow.unknown?, names)
      result == :acquired ? assert_equal(5.0, flow.acquired.first_sent_at) : assert_instance_of(result, flow.error, names)
    end
  end

  def test_an_acquire_try_is_shorter_than_the_lease_and_than_the_timeout
    request = O.acquire("k", ttl: 5, **IDS)

    assert_equal(4.0, O::AcquireFlow.new(request, ttl: 5, timeout: 10.0).next_try.timeout)
    assert_equal(1.5, O::AcquireFlow.new(request, ttl: 5, timeout: 1.5).next_try.timeout)
    assert_same(request, O::AcquireFlow.new(request, ttl: 5, timeout: 1.5).next_try.request)
  end

  # [tries allowed, outcomes in order] -> error or nil
  RELEASES = {
    [2, %i[released]] => nil,
    [2, %i[lost released]] => nil,
    [2, %i[lost held]] => nil,
    [2, %i[broken held]] => nil,
    [2, %i[held]] => Volcano::Error::ConflictError,
    [2, %i[lost lost]] => Volcano::Error::TransportError,
    [2, %i[broken broken]] => Volcano::Error::ServerError,
    [2, %i[limited]] => Volcano::Error::RateLimitedError,
    [1, %i[lost]] => Volcano::Error::TransportError,
    [1, %i[broken]] => Volcano::Error::ServerError
  }.freeze

  def test_a_release_on_the_way_out_takes_no_more_tries_than_it_may
    RELEASES.each do |(tries, names), error|
      flow = O::ReleaseFlow.new(O.release("k", **IDS), tries: tries)
      left = names.dup
      flow.take(outcome(left.shift)) while flow.next_try

      assert_empty(left, names)
      assert_equal(error.nil?, flow.released?, names)
      error ? assert_instance_of(error, flow.error) : assert_nil(flow.error, names)
    end
    assert_equal(2.0, O::ReleaseFlow.new(O.release("k", **IDS), tries: 2).next_try.timeout)
  end

  private

  def renew_many(*keys)
    leases = keys.map { |key| [Volcano::LockLease.new(key: key, token: TOKEN, expires_at: Time.now, fencing_token: 7), 30] }
    O.renew_many(leases, **IDS.except(:token))
  end

  # The Grant in an answer to two leases, of which the second is this one.
  def granted_among(item)
    request = renew_many("b", "a")
    body = JSON.generate(leases: [{ key: "b", code: "lock_held", error: "No." }, item])
    answer = O::Answer.new(sent_at: 100.0, status: 200, headers: {}, body: body)
    O.granted(request, O.renewed_each(request, %w[b a], answer).last)
  end

  def answer(status, body, headers = {})
    body = JSON.generate(body) if body.is_a?(Hash)
    O::Answer.new(sent_at: 5.0, status: status, headers: headers, body: body)
  end

  def outcome(name)
    case name
    when :granted then answer(201, { expires_at: "2026-11-29T12:00:00Z", fencing_token: 7 })
    when :released then answer(204, "")
    when :lost, :unreached then O::Failure.new(sent_at: 5.0, error: Volcano::Error::TransportError.new("lost"), reached: name == :lost)
    when :busy then answer(503, { error: "Busy.", code: "lock_service_unavailable" })
    when :broken then answer(500, "")
    when :junk then answer(201, "junk")
    when :held then answer(409, { error: "Held.", code: "lock_held" })
    when :limited then answer(429, { error: "Slow.", code: "lock_rate_limited" })
    when :teapot then answer(418, "")
    end
  end
end

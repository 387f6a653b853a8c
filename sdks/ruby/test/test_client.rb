# frozen_string_literal: true

require "test_helper"
require "logger"
require "stringio"

class TestClient < VolcanoTest
  URL = "http://127.0.0.1:9"

  def test_settings_come_from_the_environment_when_absent
    with_environment("VOLCANO_API_URL" => URL, "VOLCANO_SERVICE_KEY" => "sk-env", "VOLCANO_ANON_KEY" => "ak-env") do
      assert_equal("sk-env", Volcano::Client.new.service_key)
      assert_equal("sk-arg", Volcano::Client.new(service_key: "sk-arg").service_key)
    end
    with_environment("VOLCANO_API_URL" => " ", "VOLCANO_SERVICE_KEY" => "") do
      assert_raises(ArgumentError) { Volcano::Client.new }
    end
  end

  def test_a_missing_url_names_the_argument_the_variable_and_the_command
    message = assert_raises(ArgumentError) { Volcano::Client.new }.message

    assert_match(/api_url:/, message)
    assert_match(/VOLCANO_API_URL/, message)
    assert_match(/volcano-server dev/, message)
  end

  def test_settings_that_cannot_be_right_are_refused
    ["ftp://x", "localhost:8000", "http://", "", 5, :x, "http://u:geheim@h", "http://h?x", "http://h#x", "http:// h"].each do |url|
      message = assert_raises(ArgumentError, url.inspect) { Volcano::Client.new(api_url: url) }.message
      refute_match(/geheim/, message)
    end
    [0, -1, "10", nil, Float::NAN, Float::INFINITY, true, Complex(1, 1)].each do |timeout|
      assert_raises(ArgumentError, timeout.inspect) { Volcano::Client.new(api_url: URL, timeout: timeout) }
    end
    ["sk-geheim\n", "", "sk geheim", 5, "sk-gehéim"].each do |key|
      next if key == ""

      message = assert_raises(ArgumentError, key.inspect) { Volcano::Client.new(api_url: URL, service_key: key) }.message
      refute_match(/geh/, message)
    end
    ["nonsense", :other, 5].each { |proxy| assert_raises(ArgumentError) { Volcano::Client.new(api_url: URL, proxy: proxy) } }
    assert_raises(ArgumentError) { Volcano::Client.new(api_url: URL, servicekey: "sk-x") }
  end

  def test_without_a_service_key_each_call_says_so_and_sends_nothing
    server = ScriptedServer.open
    locks = Volcano::Client.new(api_url: server.url, anon_key: "ak-x").locks
    lease = Volcano::LockLease.new(key: "k", token: TOKEN, expires_at: Time.now, fencing_token: 1)

    [
      -> { locks.acquire("k", ttl: 5) }, -> { locks.renew("k", lease, ttl: 5) }, -> { locks.release("k", lease) },
      -> { locks.get("k") }, -> { locks.force_release("k") }, -> { locks.with_lock("k", ttl: 5) { flunk } }
    ].each do |call|
      assert_match(/service_key:.*VOLCANO_SERVICE_KEY/, assert_raises(Volcano::Error::AuthenticationError, &call).message)
    end
    assert_empty(server.requests)
    server.close
  end

  def test_the_block_form_closes_and_returns_the_blocks_value
    kept = nil
    value = Volcano::Client.new(api_url: URL, service_key: "sk-x") { |one| [kept = one, 5].last }

    assert_equal(5, value)
    assert_raises(Volcano::Error) { kept.locks.get("k") }
    assert_nil(kept.close)
  end

  def test_nothing_shows_a_secret
    log = StringIO.new
    server = ScriptedServer.open { |request| request.operation == "release" ? request.answer(500) : request.be_good }
    one = client(server.url, service_key: "sk-geheim", logger: Logger.new(log))
    shown = [one, one.locks, one.session, one.session.keeper].map(&:inspect)
    one.locks.with_lock("k", ttl: 5, token: TOKEN) { |guard| shown.concat([guard.inspect, guard.to_s, guard.lease.inspect]) }
    shown << assert_raises(ArgumentError) { one.locks.acquire("k", ttl: 5, token: TOKEN) }.full_message
    shown << log.string

    assert_match(/may stay taken for 5 s/, log.string)
    shown.compact.each { |text| refute_match(/geheim|#{TOKEN}/, text) }
    server.close
  end

  def test_a_log_that_fails_costs_nothing
    broken = Object.new.tap { |logger| logger.define_singleton_method(:warn) { |_sentence| raise "disk full" } }
    server = ScriptedServer.open { |request| request.operation == "release" ? request.answer(500) : request.be_good }

    assert_equal(1, client(server.url, logger: broken).locks.with_lock("k", ttl: 5) { 1 })
    server.close
  end

  # The second of three releases fails: docs/semantics.md#closing.
  def test_closing_loses_all_guards_first_and_releases_all_leases
    guards = {}
    server = ScriptedServer.open do |request|
      if request.operation == "release"
        assert(guards.values.all?(&:lost?))
        request.key == "b" ? request.answer(500) : request.answer(204)
      else
        request.be_good
      end
    end
    one = client(server.url)
    go = Queue.new
    bodies = %w[a b c].map do |key|
      Thread.new { assert_raises(Volcano::Error::LockLostError) { one.locks.with_lock(key, ttl: 30) { |guard| [guards[key] = guard, go.pop] } } }
    end
    wait_until { guards.size == 3 }

    error = assert_raises(Volcano::Error::ServerError) { one.close }
    3.times { go << 1 }

    assert_equal(500, error.status)
    bodies.each { |body| assert_match(/client was closed/, body.value.message) }
    assert_equal(%w[a b c], server.requests.select { |request| request.operation == "release" }.map(&:key).sort)
    server.close
  end

  # Whoever was acquiring learns of the close, and nobody will use the lease.
  def test_a_lease_that_may_have_been_granted_while_the_client_closed_is_given_back
    server = ScriptedServer.open { |request| request.operation == "acquire" ? request.hang : request.be_good }
    one = client(server.url)
    calls = [-> { one.locks.acquire("a", ttl: 30) }, -> { one.locks.with_lock("b", ttl: 30) { flunk } }]
    calls = calls.map { |call| Thread.new { assert_raises(Volcano::Error::TransportError, &call) } }
    wait_until { server.requests.size == 2 }

    one.close

    calls.each(&:value)
    assert_equal(%w[acquire acquire release release], server.operations.sort)
    assert_equal(%w[a b], server.requests.select { |request| request.operation == "release" }.map(&:key).sort)
    wait_until { server.open_connections.zero? }
    server.close
  end

  def test_the_leases_of_direct_calls_survive_a_close
    server = ScriptedServer.open
    one = client(server.url)
    one.locks.acquire("k", ttl: 30)
    one.close

    assert_equal(["acquire"], server.operations)
    server.close
  end

  private

  def with_environment(changes)
    before = ENV.to_h
    ENV.update(changes)
    yield
  ensure
    ENV.replace(before)
  end
end

# frozen_string_literal: true

require "test_helper"
require "rbconfig"
require "tmpdir"

class TestTransport < VolcanoTest
  def teardown
    super
    @server&.close
  end

  def test_a_connection_is_kept_and_used_again
    locks = locks_of { |request| request.be_good }

    5.times { locks.get("k") }

    assert_equal([1, 5], [@server.connections, @server.requests.size])
  end

  def test_the_request_is_on_the_wire_as_the_protocol_says
    locks = locks_of { |request| request.be_good }

    locks.acquire("a:b", ttl: 30, token: TOKEN, request_id: TOKEN)

    request = @server.requests.first
    assert_equal(["POST", "/locks/a%3Ab/lease", %({"ttl_seconds":30})], [request.http_method, request.path, request.body])
    assert_equal(
      ["Bearer sk-test", "application/json", TOKEN, TOKEN, "127.0.0.1:#{@server.port}"],
      request.headers.values_at("authorization", "content-type", "x-volcano-lock-token", "x-volcano-request-id", "host")
    )
  end

  def test_the_path_of_the_url_comes_first
    @server = ScriptedServer.open
    client("#{@server.url}/api/").locks.get("k")

    assert_equal("/api/locks/k", @server.requests.first.path)
  end

  # Puma, nginx and uvicorn close idle connections whenever they like.
  def test_a_kept_connection_that_the_server_closed_is_replaced_unseen
    locks = locks_of do |request|
      request.be_good
      request.socket.close
    end

    5.times do
      locks.get("k")
      wait_until { @server.open_connections.zero? }
    end

    assert_equal([5, 5], [@server.connections, @server.requests.size])
  end

  # Nobody asked for what comes on an idle connection; the next question must not get it for an answer.
  def test_an_answer_that_nobody_asked_for_is_nobodys_answer
    locks = locks_of do |request|
      request.answer(200, { held: false })
      request.answer(200, { held: true, expires_at: "2026-11-29T12:00:00Z", fencing_token: 7 })
    end

    3.times do
      refute_predicate(locks.get("k"), :held?)
      sleep(0.02)
    end
    assert_equal(3, @server.connections)
  end

  def test_a_lane_that_was_idle_for_long_is_not_used_again
    clock = ManualClock.new
    locks = locks_of(clock: clock) { |request| request.be_good }

    locks.get("k")
    clock.jump(29)
    locks.get("k")
    clock.jump(31)
    locks.get("k")

    assert_equal(2, @server.connections)
    wait_until { @server.open_connections == 1 }
  end

  # Net::HTTP by itself sends GET, DELETE and PUT again.
  def test_nothing_is_sent_twice_when_the_answer_is_lost
    locks = locks_of { |request| request.number == 1 ? request.be_good : request.reset }
    lease = Volcano::LockLease.new(key: "k", token: TOKEN, expires_at: Time.now, fencing_token: 1)
    locks.get("k")

    assert_raises(Volcano::Error::TransportError) { locks.get("k") }
    assert_raises(Volcano::Error::TransportError) { locks.force_release("k") }
    assert_raises(Volcano::Error::TransportError) { locks.release("k", lease) }
    error = assert_raises(Volcano::Error::TransportError) { locks.renew("k", lease, ttl: 30) }

    assert_equal(%w[get get force_release release renew], @server.operations)
    assert_match(%r{renew got no answer from http://127.0.0.1:\d+: }, error.message)
    assert_kind_of(SystemCallError, error.cause)
  end

  def test_a_redirect_is_not_followed
    locks = locks_of { |request| request.answer(307, "", Location: "#{@server.url}/elsewhere") }

    error = assert_raises(Volcano::Error) { locks.get("k") }

    assert_equal([307, 1], [error.status, @server.requests.size])
  end

  def test_a_hung_answer_ends_with_the_timeout_and_its_connection
    locks = locks_of(timeout: 0.15) { |request| request.number == 1 ? request.hang : request.be_good }

    took = seconds do
      error = assert_raises(Volcano::Error::TransportError) { locks.get("k") }
      assert_match(/none within 0.15 s/, error.message)
    end

    assert_in_delta(0.15, took, 0.2)
    locks.get("k")
    assert_equal([1, 2], @server.requests.map(&:connection))
  end

  def test_a_server_that_dribbles_gains_no_time
    locks = locks_of(timeout: 0.3) do |request|
      request.socket.write("HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
      1000.times { [request.socket.write(" "), sleep(0.02)] }
    end

    took = seconds { assert_raises(Volcano::Error::TransportError) { locks.get("k") } }

    assert_in_delta(0.3, took, 0.3)
  end

  def test_what_is_no_http_is_no_answer
    ["junk\r\n\r\n", "HTTP/1.1 twohundred\r\n\r\n", "HTTP/1.1 200 OK\r\nno header\r\n\r\n", "HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n{}", "HTTP/1.1 200 OK\r\nX: a\rb\r\n\r\n{}",
     "HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\n{\"held\"", "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"].each do |junk|
      locks = locks_of(timeout: 5) do |request|
        request.socket.write(junk)
        request.socket.close
      end

      error = assert_raises(Volcano::Error, junk) { locks.get("k") }

      assert_kind_of(Volcano::Error::TransportError, error, junk)
      @server.close
    end
  end

  def test_a_body_without_end_is_cut_off
    locks = locks_of(timeout: 5) { |request| request.answer(200, "x" * 600_000) }

    error = assert_raises(Volcano::Error::TransportError) { locks.get("k") }

    assert_match(/longer than 524288 bytes/, error.message)
  end

  def test_an_unreachable_server_is_said_to_be_so
    port = TCPServer.open("127.0.0.1", 0) { |one| one.addr[1] }

    error = assert_raises(Volcano::Error::TransportError) { client("http://127.0.0.1:#{port}").locks.get("k") }

    assert_match(%r{could not connect to http://127.0.0.1:#{port}: }, error.message)
    assert_instance_of(Errno::ECONNREFUSED, error.cause)
  end

  def test_a_proxy_of_the_environment_is_used_and_named_and_can_be_ignored
    port = TCPServer.open("127.0.0.1", 0) { |one| one.addr[1] }
    with_environment("http_proxy" => "http://user:geheim@127.0.0.1:#{port}") do
      url = "http://locks.example.invalid"
      through = assert_raises(Volcano::Error::TransportError) { client(url, proxy: :environment).locks.get("k") }
      direct = assert_raises(Volcano::Error::TransportError) { client(url, proxy: nil).locks.get("k") }

      assert_match(%r{through the proxy http://127.0.0.1:#{port}}, through.message)
      refute_match(/geheim/, through.full_message)
      refute_match(/proxy/, direct.message)
    end
  end

  def test_a_proxy_gets_the_whole_url_and_its_credentials
    @server = ScriptedServer.open
    proxy = "http://us%40er:geheim@127.0.0.1:#{@server.port}"
    client("http://locks.example.invalid", proxy: proxy).locks.get("k")

    request = @server.requests.first
    assert_equal("http://locks.example.invalid/locks/k", request.path)
    assert_equal("Basic #{["us@er:geheim"].pack("m0")}", request.headers["proxy-authorization"])
  end

  # What is trusted is fixed when OpenSSL is loaded, so the client is a program of its own.
  def test_over_tls_a_connection_is_kept_and_a_stranger_is_not_trusted
    Dir.mktmpdir do |directory|
      tls, certificate = tls_context
      trusted = File.join(directory, "trusted.pem").tap { |path| File.write(path, certificate.to_pem) }
      @server = ScriptedServer.open(tls: tls) { |request| request.operation == "watch" ? [request.open_stream_head, request.tell("released"), request.hang] : request.be_good }
      program = "locks = Volcano::Client.new.locks; 3.times { p locks.get('k').held?; sleep(0.05) } rescue puts($!.class, $!.message)"
      watching = "; Volcano::Client.new.locks.watch(key: 'k') { |event| break puts(event.type) }"

      assert_equal("#{"false\n" * 3}released\n", run_program(program + watching, "SSL_CERT_FILE" => trusted))
      assert_equal([2, 4], [@server.connections, @server.requests.size])
      assert_match(/TransportError\nget could not connect to https.*certificate verify failed/, run_program(program, "SSL_CERT_FILE" => "/dev/null"))
      assert_equal(4, @server.requests.size)
    end
  end

  def test_after_a_close_nothing_is_open_and_calls_in_flight_end
    one = client_of { |request| request.number == 1 ? request.be_good : request.hang }
    one.locks.get("k")
    calls = Array.new(2) { Thread.new { assert_raises(Volcano::Error::TransportError) { one.locks.get("k") } } }
    wait_until { @server.requests.size == 3 }

    one.close

    calls.each(&:value)
    wait_until { @server.open_connections.zero? }
    assert_match(/this client is closed/, assert_raises(Volcano::Error) { one.locks.get("k") }.message)
  end

  def test_what_is_aborted_before_it_was_sent_is_not_sent
    one = client_of { |request| request.be_good }
    one.locks.get("k")
    request = Volcano::Operations.get("k", request_id: TOKEN, service_key: "sk-test")
    outcome = one.session.transport.call(Volcano::Operations::Try.new(request: request, timeout: 5.0), &:abort)

    assert_match(/given up/, outcome.error.message)
    assert_equal(1, @server.requests.size)
  end

  def test_an_interrupted_exchange_closes_its_lane
    locks = locks_of { |request| request.number == 1 ? [sleep(0.05), request.be_good] : request.be_good }

    assert_raises(Timeout::Error) { Timeout.timeout(0.02) { locks.get("k") } }
    locks.get("k")

    assert_equal([1, 2], @server.requests.map(&:connection))
  end

  # `rescue` lists must not take what another thread raises here for a broken connection.
  def test_what_is_raised_into_a_call_comes_out_as_it_is
    [Timeout::Error, RuntimeError, Interrupt, SystemExit].each do |kind|
      locks = locks_of(&:hang)
      call = Thread.new { assert_raises(kind) { locks.get("k") } }
      wait_until { @server.requests.any? }

      call.raise(kind, "from outside")

      assert_equal("from outside", call.value.message)
      @server.close
    end
  end

  # A user may call a lock under a mask of their own, with an interrupt waiting.
  def test_an_interrupt_that_the_caller_masked_does_not_disturb_a_call
    locks = locks_of { |request| [sleep(0.2), request.be_good] }
    call = Thread.new do
      Thread.handle_interrupt(RuntimeError => :never) { locks.get("k") }.tap { Thread.current[:got] = true }
    rescue RuntimeError
      :interrupted_afterwards
    end
    wait_until { @server.requests.any? }
    call.raise("now")

    assert_equal(:interrupted_afterwards, call.value)
    assert_equal(1, @server.requests.size)
  end

  private

  def client_of(**settings, &script)
    @server = ScriptedServer.open(&script)
    client(@server.url, **settings)
  end

  def locks_of(**settings, &script)
    client_of(**settings, &script).locks
  end

  def tls_context
    key = OpenSSL::PKey::RSA.new(2048)
    certificate = OpenSSL::X509::Certificate.new
    certificate.version = 2
    certificate.serial = 1
    certificate.subject = certificate.issuer = OpenSSL::X509::Name.parse("/CN=127.0.0.1")
    certificate.not_before = Time.now - 60
    certificate.not_after = Time.now + 3600
    certificate.public_key = key.public_key
    certificate.add_extension(OpenSSL::X509::ExtensionFactory.new(nil, certificate).create_extension("subjectAltName", "IP:127.0.0.1"))
    certificate.sign(key, OpenSSL::Digest.new("SHA256"))
    context = OpenSSL::SSL::SSLContext.new
    context.cert, context.key = certificate, key
    [context, certificate]
  end

  def run_program(program, environment)
    settings = { "VOLCANO_API_URL" => @server.url, "VOLCANO_SERVICE_KEY" => "sk-x", **environment }
    load_path = $LOADED_FEATURES.grep(%r{/volcano\.rb\z}).first.delete_suffix("/volcano.rb")
    IO.popen([settings, RbConfig.ruby, "-w", "-I", load_path, "-r", "volcano", "-e", program], err: %i[child out], &:read)
  end

  def with_environment(changes)
    before = ENV.to_h
    ENV.update(changes)
    yield
  ensure
    ENV.replace(before)
  end
end

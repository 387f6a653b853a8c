# frozen_string_literal: true

require "test_helper"
require "rbconfig"

# Somebody interrupts the thread that holds a lock, or is about to: docs/semantics.md#cancel.
class TestInterrupts < VolcanoTest
  STEPS = 200

  # x goes over the whole call: before the send, between send and answer, in the block, in the release.
  def test_a_timeout_at_any_moment_leaves_no_lease_behind
    client = RealServer.client
    other = RealServer.key
    lease = client.locks.acquire(other, ttl: 60)
    whole = Array.new(9) { seconds { client.locks.with_lock(RealServer.key, ttl: 60) { sleep(0.001) } } }.sort[4]
    ends = Hash.new(0)

    STEPS.times do |step|
      key = RealServer.key
      ends[swept(client, key, 0.0001 + (step * whole * 1.5 / STEPS))] += 1

      refute_predicate(client.locks.get(key), :held?, "after step #{step}")
      assert_equal(lease.fencing_token, client.locks.get(other).fencing_token, "another request's answer after step #{step}")
    end

    assert_operator(ends[:timeout], :>, STEPS / 10, ends)
    assert_operator(ends[:done], :>, 0, ends)
  ensure
    client&.close
  end

  # The same over a server so slow that most steps fall between the send and the answer, with each answer naming its question.
  def test_a_timeout_in_mid_acquire_waits_for_the_answer_and_gives_it_back
    held = {}
    server = ScriptedServer.open do |request|
      sleep(0.01)
      request.operation == "release" ? held.delete(request.key) : held[request.key] = true if %w[acquire release].include?(request.operation)
      request.operation == "acquire" ? request.grant(fencing_token: request.key.delete("k").to_i) : request.be_good
    end
    one = client(server.url)

    40.times do |step|
      token = nil
      begin
        Timeout.timeout(0.0002 + (step * 0.0008)) { one.locks.with_lock("k#{step}", ttl: 60) { |guard| token = guard.lease.fencing_token } }
      rescue Timeout::Error
        nil
      end
      assert_includes([nil, step], token)
      assert_empty(held, "after step #{step}")
    end
    server.close
  end

  def test_a_cancelled_acquire_waits_two_seconds_and_no_longer
    server = ScriptedServer.open { |request| request.operation == "acquire" ? request.hang : request.be_good }
    one = client(server.url)

    took = seconds { assert_raises(Timeout::Error) { Timeout.timeout(0.05) { one.locks.with_lock("k", ttl: 60) { flunk } } } }

    assert_in_delta(2.05, took, 0.5)
    assert_equal(%w[acquire release], server.operations)
    server.close
  end

  def test_a_cancelled_acquire_with_the_callers_token_is_theirs_to_recover
    server = ScriptedServer.open { |request| [request.operation == "acquire" && sleep(0.5), request.be_good] }
    one = client(server.url)

    assert_raises(Timeout::Error) { Timeout.timeout(0.2) { one.locks.acquire("k", ttl: 60, token: TOKEN) } }
    assert_raises(Timeout::Error) { Timeout.timeout(0.2) { one.locks.acquire("k", ttl: 60) } }

    assert_equal(%w[acquire acquire release], server.operations)
    server.close
  end

  def test_a_call_that_cannot_connect_is_left_at_once_and_gives_nothing_back
    # A listener with a full backlog: the connection is never made.
    listener = Socket.new(:INET, :STREAM).tap { |socket| [socket.bind(Addrinfo.tcp("127.0.0.1", 0)), socket.listen(0)] }
    address = listener.local_address
    fillers = Array.new(4) { Socket.new(:INET, :STREAM).tap { |socket| socket.connect_nonblock(address, exception: false) } }
    one = client("http://127.0.0.1:#{address.ip_port}", timeout: 0.5)
    GC.disable # it would close what is forgotten
    before = open_sockets

    took = seconds { assert_raises(Timeout::Error) { Timeout.timeout(0.1) { one.locks.with_lock("k", ttl: 60) { flunk } } } }

    assert_in_delta(0.1, took, 0.3)
    wait_until { (open_sockets - before).empty? && Thread.list.none? { |thread| thread.name == "volcano connection" } }
  ensure
    GC.enable
    [listener, *fillers].compact.each(&:close)
  end

  def test_a_second_interrupt_during_the_release_does_not_stop_it
    released = false
    server = ScriptedServer.open do |request|
      request.operation == "release" ? [sleep(0.2), released = true, request.be_good] : request.be_good
    end
    one = client(server.url)
    body = Thread.new { [Thread.current.report_on_exception = false, one.locks.with_lock("k", ttl: 60) { sleep }] }
    wait_until { server.operations == ["acquire"] && body.status == "sleep" }

    body.raise("first")
    wait_until { server.operations.last == "release" }
    body.raise("second")

    error = assert_raises(RuntimeError) { body.value }
    assert_includes(%w[first second], error.message)
    assert(released)
    assert_equal(%w[acquire release], server.operations)
    server.close
  end

  def test_with_the_server_away_an_interrupt_goes_on_and_only_the_log_hears_of_the_release
    server = ScriptedServer.open
    one = client(server.url)

    took = seconds do
      error = assert_raises(Timeout::Error) do
        Timeout.timeout(0.1) { one.locks.with_lock("k", ttl: 60) { [server.close, sleep] } }
      end
      assert_match(/execution expired/, error.message)
    end

    assert_operator(took, :<, 2)
  end

  # SIGINT comes through any mask; a program of its own, since it is one for the main thread.
  SIGNALLED = <<~'RUBY'
    client = Volcano::Client.new
    key = ENV.fetch("KEY")
    begin
      if ENV["TRAP"]
        trap(ENV.fetch("TRAP")) { raise "trapped" }
      end
      client.locks.with_lock(key, ttl: 60) { $stdout.puts("in"); $stdout.flush; sleep }
    ensure
      $stdout.puts(client.locks.get(key).held?)
    end
  RUBY

  def test_signals_release
    { "INT" => nil, "TERM" => nil, "USR1" => "USR1" }.each do |signal, trap|
      program = start(SIGNALLED, { "KEY" => RealServer.key, "TRAP" => trap })
      assert_equal("in\n", program.gets)

      Process.kill(signal, program.pid)

      assert_equal("false\n", program.gets, signal)
      program.close
    end
  end

  # A SIGINT in the middle of the acquire, and another in the middle of what gives it back.
  def test_a_sigint_in_mid_acquire_and_again_in_mid_release_gives_the_lease_back
    server = ScriptedServer.open { |request| [sleep(0.3), request.be_good] }
    program = start(<<~'RUBY', { "URL" => server.url })
      Volcano::Client.new(api_url: ENV.fetch("URL"), service_key: "sk-x").locks.with_lock("k", ttl: 60) { $stdout.puts("in") }
    RUBY
    wait_until(10) { server.operations == ["acquire"] }
    Process.kill("INT", program.pid)
    wait_until { server.operations.last == "release" }
    Process.kill("INT", program.pid)

    assert_equal("", program.read)
    program.close
    assert_equal(Signal.list["INT"], $?.termsig)
    assert_equal(%w[acquire release release], server.operations)
    server.close
  end

  def test_the_end_of_the_main_thread_ends_the_process_within_a_second
    program = start(<<~'RUBY', { "KEY" => RealServer.key }, err: %i[child out])
      client = Volcano::Client.new
      Thread.new { client.locks.with_lock(ENV.fetch("KEY"), ttl: 5) { $stdout.puts("in"); $stdout.flush; sleep } }
      client.locks.with_lock(ENV.fetch("KEY") + "2", ttl: 5) { sleep(2.5) }
      at_exit { $stdout.puts(Process.clock_gettime(Process::CLOCK_MONOTONIC)) }
    RUBY
    assert_equal("in\n", program.gets)
    at_exit = Float(program.gets)
    rest = program.read
    program.close

    assert_operator(Process.clock_gettime(Process::CLOCK_MONOTONIC) - at_exit, :<, 1)
    assert_equal("", rest)
    assert_predicate($?, :success?)
  end

  private

  def swept(client, key, after)
    Timeout.timeout(after) { client.locks.with_lock(key, ttl: 60) { sleep(0.001) } }
    :done
  rescue Timeout::Error
    :timeout
  end

  def open_sockets
    ObjectSpace.each_object(Socket).reject(&:closed?)
  end

  # A Ruby program with the SDK; what it says can be read.
  def start(program, environment, err: File::NULL)
    settings = { "VOLCANO_API_URL" => RealServer.url, "VOLCANO_SERVICE_KEY" => RealServer.service_key, **environment }
    load_path = $LOADED_FEATURES.grep(%r{/volcano\.rb\z}).first.delete_suffix("/volcano.rb")
    IO.popen([settings, RbConfig.ruby, "-w", "-I", load_path, "-r", "volcano", "-e", program], err: err)
  end
end

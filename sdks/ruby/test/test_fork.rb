# frozen_string_literal: true

require "test_helper"

# Puma, Sidekiq and Resque fork with a client in hand: the child owns nothing of the parent's.
class TestFork < VolcanoTest
  def setup
    @server = ScriptedServer.open
    @client = client(@server.url)
    @locks = @client.locks
  end

  def teardown
    super
    @server.close
  end

  def test_the_child_of_a_held_lock_owns_nothing_and_releases_nothing
    told = nil
    @locks.with_lock("k", ttl: 30) do |guard|
      told = in_child do |say|
        say.call(guard.lost?, guard.wait_lost(timeout: 5), (guard.check! rescue $!.class.name), guard.on_lost { nil }.equal?(guard))
      end
      refute_predicate(guard, :lost?)
      guard.check!
    end

    assert_equal([true, true, "Volcano::Error::LockLostError", true], told)
    assert_equal(%w[acquire release], @server.operations)
  end

  # `fork` without a block: the child itself leaves the block of with_lock.
  def test_a_child_that_leaves_the_block_gets_a_loss_and_sends_nothing
    out, into = IO.pipe
    pid = nil
    begin
      @locks.with_lock("k", ttl: 30) { pid = fork }
      child_says = "nothing"
    rescue Volcano::Error::LockLostError => error
      child_says = error.message
    end
    if pid.nil?
      into.write(child_says)
      into.close
      exit!(0)
    end
    into.close

    assert_match(/the process that this one was forked from/, out.read)
    Process.wait(pid)
    assert_equal("nothing", child_says)
    assert_equal(%w[acquire release], @server.operations)
  end

  def test_the_child_opens_its_own_connection_and_the_parents_stays_as_it_was
    @locks.get("before")
    told = in_child { |say| say.call(@locks.get("child").held?, @locks.with_lock("child", ttl: 5) { 7 }) }
    @locks.get("after")

    assert_equal([false, 7], told)
    connections = @server.requests.group_by(&:key).transform_values { |requests| requests.map(&:connection).uniq }
    assert_equal(connections["before"], connections["after"])
    refute_equal(connections["before"], connections["child"])
  end

  # A socket that the child keeps would keep the server from seeing the parent's end.
  def test_the_child_lets_go_of_the_parents_sockets_at_once
    others = sockets
    @locks.get("k")
    inodes = sockets - others
    told = in_child { |say| say.call((sockets & inodes).size) }

    refute_empty(inodes)
    assert_equal([0], told)
  end

  def test_a_daemon_is_a_child_too
    out, into = IO.pipe
    pid = fork do
      @locks.with_lock("k", ttl: 30) do |guard|
        Process.daemon(true, true)
        into.write(JSON.generate([guard.lost?, @locks.get("k").held?]))
        into.close
      end
    rescue Volcano::Error::LockLostError
      exit!(0)
    end
    into.close

    assert_equal([true, false], JSON.parse(out.read))
    Process.wait(pid)
    refute_includes(@server.operations, "release")
  end

  def test_a_closed_client_of_the_parent_is_closed_in_the_child
    @client.close

    assert_equal(["this client is closed"], in_child { |say| say.call((@locks.get("k") rescue $!.message)) })
  end

  def test_clients_that_nobody_closed_are_forgotten_with_their_sockets
    watched = Volcano::Fork.watched
    Thread.new do
      clients = Array.new(50) { Volcano::Client.new(api_url: @server.url, service_key: "sk-x").tap { |one| one.locks.get("k") } }
      assert_operator(Volcano::Fork.watched, :>=, clients.size)
    end.join

    wait_until(10, "garbage collection") { [GC.start, Array.new(1000) { "x" }] && Volcano::Fork.watched < watched + 10 }

    assert_equal([7], in_child { |say| say.call(@locks.with_lock("child", ttl: 30) { 7 }) })
  end

  # The fork may come while another thread holds any mutex of the SDK.
  def test_forks_while_other_threads_are_busy_hang_no_child
    stop = false
    busy = Array.new(4) { |number| Thread.new { @locks.with_lock("busy#{number}", ttl: 30) { |guard| guard.lost? } until stop } }

    20.times { assert_equal([7], in_child { |say| say.call(@locks.with_lock("child", ttl: 30) { |guard| guard.lost? ? 0 : 7 }) }) }

    stop = true
    busy.each(&:join)
  end

  private

  # What the block says in a forked child.
  def in_child
    out, into = IO.pipe
    pid = fork do
      out.close
      yield ->(*facts) { into.write(JSON.generate(facts)) }
    rescue Exception => error
      into.write(JSON.generate([error.full_message(highlight: false)]))
    ensure
      into.close
      exit!(0)
    end
    into.close
    told = Timeout.timeout(10) { out.read }
    Process.wait(pid)
    JSON.parse(told)
  rescue Timeout::Error
    Process.kill(:KILL, pid)
    flunk("the child hangs")
  end

  def sockets
    ObjectSpace.each_object(Socket).reject(&:closed?).map { |socket| socket.to_io.stat.ino }
  end
end

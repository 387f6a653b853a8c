# frozen_string_literal: true

require "test_helper"
require "rbconfig"

# What takes several TTLs of real time. Each is a program of its own against the real server; all start as this file
# is loaded and run beside the other tests, which only come to hear how they ended.
class TestEndurance < VolcanoTest
  PROGRAMS = {
    # The parent made the client, used it and holds a lock of its own; the child holds one for three TTLs.
    forked_child: <<~'RUBY',
      client = Volcano::Client.new
      say = lambda { |fact| $stdout.puts(fact); $stdout.flush }
      client.locks.with_lock("endurance:parent", ttl: 5) do |mine|
        pid = fork do
          first = last = nil
          client.locks.with_lock("endurance:child", ttl: 5) do |guard|
            first = guard.lease.expires_at
            sleep(15)
            last = guard.lease.expires_at
            say.call("child held=#{!guard.lost?} renewed=#{last - first > 9} parents=#{mine.lost?}")
          end
          exit!(0)
        end
        Process.wait(pid)
        say.call("parent held=#{!mine.lost?}")
      end
      say.call("free=#{!client.locks.get("endurance:parent").held? && !client.locks.get("endurance:child").held?}")
    RUBY
    # Fibers hold the locks, so that every further thread is the SDK's.
    five_hundred_locks: <<~'RUBY'
      client = Volcano::Client.new
      before = Thread.list.size
      most = 0
      guards = []
      fibers = Array.new(500) do |number|
        Fiber.new { client.locks.with_lock("many:#{number}", ttl: 15) { |guard| [guards << guard, Fiber.yield] } }.tap(&:resume)
      end
      first = guards.to_h { |guard| [guard, guard.lease.expires_at] }
      120.times { [most = [most, Thread.list.size - before].max, sleep(0.1)] }
      lost = guards.count(&:lost?)
      renewed = guards.count { |guard| guard.lease.expires_at - first[guard] > 7 }
      fibers.each(&:resume)
      sleep(2.5)
      $stdout.puts("threads=#{most} lost=#{lost} renewed=#{renewed} left=#{Thread.list.size - before} free=#{Array.new(500) { |number| client.locks.get("many:#{number}").held? }.none?}")
    RUBY
  }.freeze

  def self.start(program)
    settings = { "VOLCANO_API_URL" => RealServer.url, "VOLCANO_SERVICE_KEY" => RealServer.service_key }
    load_path = $LOADED_FEATURES.grep(%r{/volcano\.rb\z}).first.delete_suffix("/volcano.rb")
    IO.popen([settings, RbConfig.ruby, "-w", "-I", load_path, "-r", "volcano", "-e", program], err: %i[child out])
  end

  RUNNING = PROGRAMS.transform_values { |program| start(program) }

  # Minitest runs what is `parallel` after all else.
  def self.test_order
    :parallel
  end

  def test_a_child_of_a_fork_keeps_its_lock_for_three_ttls_and_the_parent_its_own
    assert_equal("child held=true renewed=true parents=true\nparent held=true\nfree=true\n", said_by(:forked_child))
  end

  def test_five_hundred_locks_at_once_take_eight_threads_at_most_and_are_all_renewed
    said = said_by(:five_hundred_locks)
    facts = said.scan(/(\w+)=(\w+)/).to_h

    assert_includes(1..8, facts["threads"].to_i, said)
    assert_equal({ "lost" => "0", "renewed" => "500", "left" => "0", "free" => "true" }, facts.except("threads"), said)
  end

  private

  def said_by(name)
    said = RUNNING.fetch(name).read
    RUNNING.fetch(name).close
    said
  end
end

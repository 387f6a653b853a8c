# frozen_string_literal: true

require "test_helper"

class TestThreads < VolcanoTest
  def test_twenty_threads_on_one_client_each_get_their_own_answers
    server = ScriptedServer.open do |request|
      sleep(rand * 0.002)
      number = Integer(request.key.delete("k"))
      request.operation == "get" ? request.answer(200, { held: true, expires_at: "2026-11-29T12:00:00Z", fencing_token: number }) : request.grant(fencing_token: number)
    end
    one = client(server.url)
    before = Thread.list

    wrong = Array.new(20) do |thread|
      Thread.new do
        Array.new(50) do |round|
          number = (thread * 1000) + round
          answers = [one.locks.get("k#{number}").fencing_token, one.locks.acquire("k#{number}", ttl: 5).fencing_token]
          # Some calls are interrupted, and their late answers must reach nobody.
          Timeout.timeout(0.001) { one.locks.get("k#{number + 500}") } rescue nil if round % 5 == thread % 5
          answers - [number]
        end.flatten
      end
    end.flat_map(&:value)

    assert_empty(wrong)
    one.close
    wait_until { server.open_connections.zero? && (Thread.list - before).empty? }
    server.close
  end

  # 60 renewals of 200 ms in each third of 5 s, on a server that takes them singly: seven workers are just enough, so
  # the locks are taken one after the other.
  def test_sixty_locks_whose_renewals_are_slow_are_all_kept
    server = ScriptedServer.open do |request|
      next request.refuse(404, "not_found") if request.operation == "renew_many"

      sleep(0.2) if request.operation == "renew"
      request.be_good
    end
    one = client(server.url)
    lost = Queue.new
    leave = Queue.new
    entered = Queue.new
    before = Thread.list
    holders = Array.new(60) do |number|
      sleep(0.02)
      Thread.new { one.locks.with_lock("k#{number}", ttl: 5) { |guard| [guard.on_lost { |loss| lost << loss }, entered << 1, leave.pop] } }
    end
    60.times { entered.pop }

    sleep(6)
    assert_includes(2..8, (Thread.list - before).count { |thread| thread.name&.start_with?("volcano") })
    60.times { leave << 1 }
    holders.each(&:join)

    assert_empty(lost)
    assert_operator(server.requests.count { |request| request.operation == "renew" }, :>=, 120)
    one.close
    wait_until { server.open_connections.zero? && (Thread.list - before).empty? }
    server.close
  end
end

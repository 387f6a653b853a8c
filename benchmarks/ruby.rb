# frozen_string_literal: true

# What the Ruby SDK has to show, against a server of its own (`volcano-server dev`), in about two minutes:
#
#   ruby -Isdks/ruby/lib benchmarks/ruby.rb PATH-OF-volcano-server
#
# - `Timeout.timeout(x) { with_lock { … } }` with x over the whole call in 200 steps: leases left behind, wrong answers.
# - 500 locks held at once for two TTLs of 15 s: further threads, renewals, losses.
# - 20 threads on one client for 10 s: wrong answers, threads and sockets afterwards.
# - 10 000 locks held for 60 s at a TTL of 30 s: losses, renewal requests, share of one CPU.
# - One acquire and release after the other: milliseconds, and CPU over two bare requests of Net::HTTP.

require "json"
require "net/http"
require "securerandom"
require "timeout"
require "volcano"

SERVER = IO.popen([ARGV.fetch(0, "volcano-server"), "dev", "--port", "0", "--ephemeral", "--json", "--quota", "0"], err: File::NULL)
at_exit { Process.kill(:TERM, SERVER.pid) }
FACTS = JSON.parse(SERVER.gets)

def client(&block)
  Volcano::Client.new(api_url: FACTS.fetch("url"), service_key: FACTS.fetch("service_key"), &block)
end

def now
  Process.clock_gettime(Process::CLOCK_MONOTONIC)
end

def cpu
  start = Process.clock_gettime(Process::CLOCK_PROCESS_CPUTIME_ID)
  yield
  Process.clock_gettime(Process::CLOCK_PROCESS_CPUTIME_ID) - start
end

def sockets
  Dir.children("/proc/self/fd").count { |fd| File.readlink("/proc/self/fd/#{fd}").start_with?("socket:") rescue false }
end

def sweep(volcano, steps: 200)
  other = volcano.locks.acquire("sweep:other", ttl: 60)
  times = Array.new(21) { now.tap { volcano.locks.with_lock("sweep:warm", ttl: 60) { sleep(0.001) } }.then { |start| now - start } }
  whole = times.sort[10]
  counts = { steps: steps, interrupted: 0, leases_left: 0, wrong_answers: 0 }
  steps.times do |step|
    key = "sweep:#{step}"
    begin
      Timeout.timeout(0.00005 + (step * 1.3 * whole / steps)) { volcano.locks.with_lock(key, ttl: 60) { sleep(0.001) } }
    rescue Timeout::Error
      counts[:interrupted] += 1
    end
    counts[:leases_left] += 1 if volcano.locks.get(key).held?
    counts[:wrong_answers] += 1 unless volcano.locks.get("sweep:other").fencing_token == other.fencing_token
  end
  { call_ms: (whole * 1000).round(2), **counts }
end

# Fibers hold the locks, so that every further thread is the SDK's.
def many(volcano, locks: 500, ttl: 15)
  before = Thread.list.size
  guards = []
  fibers = Array.new(locks) { |number| Fiber.new { volcano.locks.with_lock("many:#{number}", ttl: ttl) { |guard| [guards << guard, Fiber.yield] } }.tap(&:resume) }
  first = guards.map { |guard| guard.lease.expires_at }
  most = 0
  (ttl * 20).times { [most = [most, Thread.list.size - before].max, sleep(0.1)] }
  facts = { held: guards.size, further_threads: most, lost: guards.count(&:lost?),
            renewed: guards.zip(first).count { |guard, expires_at| guard.lease.expires_at - expires_at > ttl } }
  fibers.each(&:resume)
  facts
end

def crowd(threads: 20, seconds: 10)
  before = [Thread.list.size, sockets]
  facts = { calls: 0, wrong_answers: 0 }
  client do |volcano|
    over = now + seconds
    Array.new(threads) do |number|
      Thread.new do
        calls = wrong = 0
        while now < over
          key = "crowd:#{number}:#{calls}"
          lease = volcano.locks.acquire(key, ttl: 60)
          state = volcano.locks.get(key)
          volcano.locks.release(key, lease)
          wrong += 1 unless state.fencing_token == lease.fencing_token && lease.key == key
          calls += 3
        end
        [calls, wrong]
      end
    end.map(&:value).each { |calls, wrong| [facts[:calls] += calls, facts[:wrong_answers] += wrong] }
  end
  sleep(1.5)
  { **facts, threads_left: Thread.list.size - before[0], sockets_left: sockets - before[1] }
end

def one_after_the_other(volcano, rounds: 500)
  start = now
  rounds.times { |number| volcano.locks.with_lock("one:#{number}", ttl: 60) { nil } }
  { ms_per_with_lock: ((now - start) * 1000 / rounds).round(3) }
end

# Fibers hold them.
def ten_thousand(volcano, locks: 10_000, ttl: 30, seconds: 60)
  guards = []
  fibers = Array.new(locks) { |number| Fiber.new { volcano.locks.with_lock("held:#{number}", ttl: ttl) { |guard| [guards << guard, Fiber.yield] } }.tap(&:resume) }
  used = cpu { sleep(seconds) }
  facts = { held: guards.size, lost: guards.count(&:lost?), cpu_share: (used / seconds).round(3) }
  fibers.each(&:resume)
  facts
end

# Interleaved, the best of each.
def cpu_over_net_http(volcano, rounds: 7, calls: 200)
  url = URI(FACTS.fetch("url"))
  http = Net::HTTP.start(url.host, url.port, nil)
  times = Array.new(rounds) do
    [cpu { calls.times { |number| bare_pair(http, "bare:#{number}") } },
     cpu { calls.times { |number| volcano.locks.release("sdk:#{number}", volcano.locks.acquire("sdk:#{number}", ttl: 30)) } }]
  end
  http.finish
  bare, sdk = times.transpose.map { |all| all.min / calls * 1e6 }
  { bare_us: bare.round, sdk_us: sdk.round, ratio: (sdk / bare).round(2) }
end

def bare_pair(http, key)
  path = "/locks/#{key.gsub(":", "%3A")}/lease"
  headers = { "Authorization" => "Bearer #{FACTS.fetch("service_key")}", "Content-Type" => "application/json",
              "X-Volcano-Lock-Token" => SecureRandom.uuid, "X-Volcano-Request-Id" => SecureRandom.uuid }
  JSON.parse(http.post(path, %({"ttl_seconds":30}), headers).body)
  http.delete(path, { **headers, "X-Volcano-Request-Id" => SecureRandom.uuid })
end

client do |volcano|
  puts "CPU of a pair        #{cpu_over_net_http(volcano)}"
  puts "one after the other  #{one_after_the_other(volcano)}"
  puts "timeout sweep        #{sweep(volcano)}"
  puts "500 locks at once    #{many(volcano)}"
  puts "10 000 locks, 60 s   #{ten_thousand(volcano)}"
end
sleep(1.5) # until the first client's threads are gone
puts "20 threads for 10 s  #{crowd}"

# frozen_string_literal: true

# One agent on the Ruby SDK: ruby agent.rb NAME DESK ROLE. What it does is written in agent.py.

require "json"
require "net/http"
require "volcano"

TTL = 5
POLL_SECONDS = 1.0
WORK_SECONDS = (0.3..1.2)

# Takes the next ticket that it can get, answers it, goes on until none is open.
class Agent
  def initialize(name, desk, role, volcano)
    @name = name
    @desk = URI(desk)
    @role = role
    @volcano = volcano
  end

  def run
    until (tickets = open_tickets).empty?
      # All of those are held: leave the others some of the project's quota.
      sleep(POLL_SECONDS * rand(0.6..0.9)) if tickets.sample(3).none? { |ticket| take(ticket) }
    end
  end

  private

  # Was the ticket ours for a while?
  def take(ticket)
    @volcano.locks.with_lock("ticket:#{ticket}", ttl: TTL) do |guard|
      tell("granted", ticket, guard)
      answer(ticket, guard)
      tell("released", ticket, guard)
    end
    true
  rescue Volcano::Error::ConflictError
    false # somebody else has it: on to the next
  rescue Volcano::Error::RateLimitedError => error
    sleep(error.retry_after || POLL_SECONDS)
    false
  rescue Volcano::Error::LockLostError
    puts JSON.generate(event: "lost", agent: @name, ticket: ticket)
    true
  end

  def answer(ticket, guard)
    return unless open_tickets.include?(ticket) # answered between our look at the desk and our grant

    write(ticket, guard)
    tell("working", ticket, guard)
    role, @role = @role, "steady"
    if role == "steady"
      # Stands for the model call that writes the answer; stops early when the lock is lost.
      guard.wait_lost(timeout: rand(WORK_SECONDS))
      guard.check!
    else
      sleep(TTL * 0.6) # and then writes without a look
    end
    tell(write(ticket, guard, "Try it off and on.") ? "answered" : "refused", ticket, guard)
  end

  def open_tickets
    JSON.parse(request(Net::HTTP::Get.new("/tickets")).body)
  end

  # Under our fencing token: without an answer it only keeps older holders from writing.
  def write(ticket, guard, text = nil)
    post = Net::HTTP::Post.new("/tickets/#{ticket}")
    post.content_type = "application/json"
    post.body = JSON.generate(fencing_token: guard.lease.fencing_token, agent: @name, answer: text)
    !request(post).is_a?(Net::HTTPConflict)
  end

  def request(message)
    response = Net::HTTP.start(@desk.host, @desk.port, nil) { |http| http.request(message) }
    response.value unless response.is_a?(Net::HTTPConflict) # raises what is no success
    response
  end

  def tell(event, ticket, guard)
    at = Process.clock_gettime(Process::CLOCK_MONOTONIC) # all processes of this machine share it
    expires_at = at + (guard.lease.expires_at - Time.now)
    fencing_token = guard.lease.fencing_token
    puts JSON.generate(event: event, agent: @name, ticket: ticket, fencing_token: fencing_token, at: at, expires_at: expires_at)
  end
end

$stdout.sync = true
name, desk, role = ARGV
Volcano::Client.new do |volcano|
  puts JSON.generate(event: "ready", agent: name)
  $stdin.read # until the demo says go
  Agent.new(name, desk, role, volcano).run
end

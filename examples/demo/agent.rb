# frozen_string_literal: true

# One agent on the Ruby SDK: ruby agent.rb NAME DESK ROLE. What it does is written in agent.py.

require "json"
require "net/http"
require "timeout"
require "volcano"

TTL = 5
WORK_SECONDS = (0.3..1.2)
LOOK_AGAIN_SECONDS = 10 # an event is a hint, and may be missed

# Takes the next ticket that it can get, answers it, goes on until none is open.
class Agent
  def initialize(name, desk, role, volcano)
    @name = name
    @desk = URI(desk)
    @role = role
    @volcano = volcano
    @free = Queue.new
  end

  # Until no ticket is open.
  def run
    listener = Thread.new { listen }
    ticket = nil
    until (tickets = open_tickets).empty?
      if ticket.nil?
        tickets.shuffle.each { |each| @free << each }
      elsif tickets.include?(ticket)
        take(ticket)
      end
      ticket = next_ticket
    end
  ensure
    listener&.kill&.join
  end

  private

  # While all tickets are held nobody asks: whoever lets go of one is heard by all.
  def listen
    @volcano.locks.watch(prefix: "ticket:").each do |event|
      next if event.type == :acquired

      @free << (event.type == :reset ? nil : Integer(event.key.delete_prefix("ticket:")))
    end
  end

  # A ticket that was free a moment ago. nil: look at all of them.
  def next_ticket
    Timeout.timeout(LOOK_AGAIN_SECONDS) { @free.pop }
  rescue Timeout::Error
    nil
  end

  def take(ticket)
    @volcano.locks.with_lock("ticket:#{ticket}", ttl: TTL) do |guard|
      tell("granted", ticket, guard)
      answer(ticket, guard)
      tell("released", ticket, guard)
    end
  rescue Volcano::Error::ConflictError
    nil # somebody else has it: on to the next
  rescue Volcano::Error::RateLimitedError => error
    sleep(error.retry_after || 1)
    @free << ticket
  rescue Volcano::Error::LockLostError
    puts JSON.generate(event: "lost", agent: @name, ticket: ticket)
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

# frozen_string_literal: true

# The Ruby SDK behind stdin and stdout: conformance/protocol.md says what each line means.
#
#   stdin ──commands──> Driver#do ──> the SDK, each call on a thread of its own
#   stdout <──replies and events── Driver.emit

require "json"
require "volcano"
require_relative "virtual_clock"

# What `finish` with `raise` has a body raise.
class BodyError < StandardError; end

# What `cancel` raises in the thread of a call.
class Cancelled < StandardError; end

# What this platform cannot do.
class Unsupported < StandardError; end

class Driver
  CAPABILITIES = %w[with_lock direct_calls pushed_loss cancel close renew_many wait events].freeze
  QUIET_PATIENCE = 4.0

  LINE = Mutex.new
  private_constant :LINE

  def self.emit(**fields)
    line = JSON.generate(fields)
    Thread.handle_interrupt(Object => :never) do
      LINE.synchronize do
        $stdout.write(line, "\n")
        $stdout.flush
      end
    end
  end

  def initialize(hello)
    @clock = VirtualClock.new(Time.iso8601(hello["now"])) if hello["clock"] == "virtual"
    @client = Volcano::Client.new(
      api_url: hello["base_url"], service_key: hello["service_key"], proxy: nil, clock: @clock, logger: DriverLog,
      **(hello.key?("timeout") ? { timeout: hello["timeout"] } : {})
    )
    @session = @client.session
    @clock.exchanges = method(:exchanges) if @clock
    @threads = {} # {"1" => Thread}
    @finishes = {} # {"1" => Queue}
    @guards = {}
    @leases = {}
    @dropped = false
  end

  # Does a call still run?
  def busy?
    @threads.each_value.any?(&:alive?)
  end

  # Ends everything without a request: for a second hello.
  def drop
    @dropped = true
    @session.waiting_room.close
    @session.transports.each(&:close)
    @session.keeper.lose_all("was dropped").each { |kept| @session.keeper.finish(kept) && kept.holding.released = true }
    @threads.each_value(&:kill).each_value(&:join)
  end

  # The reply's `ok`; what must not begin before the reply is given to the block.
  def do(command)
    call = command["call"]
    case command["cmd"]
    when "with_lock", "acquire", "renew", "release", "get", "force_release", "close", "watch"
      @finishes[call] = Queue.new
      yield(-> { start(call) { public_send(command["cmd"], command) } })
    when "finish" then yield(-> { @finishes.fetch(call) << command })
    when "cancel"
      quiet if @clock
      @threads.fetch(call).raise(Cancelled, "cancelled")
    when "look" then return look(call)
    when "sleeping"
      quiet
      return { seconds: virtual.lengths, in_flight: exchanges.size, streaming: streams.map(&:taken) }
    when "advance" then advance(command)
    else raise Unsupported, "no command #{command["cmd"]} here"
    end
    {}
  end

  # --- calls, each on a thread of its own -----------------------------------------------------------

  def with_lock(command)
    call = command["call"]
    @client.locks.with_lock(command["key"], **options(command)) do |guard|
      @guards[call] = guard
      guard.on_lost { |loss| tell(event: "lost", call: call, **errors(loss)) }
      tell(event: "entered", call: call, **value(guard.lease).except(:key))
      hold_out(@finishes.fetch(call))
    end
  end

  def acquire(command)
    @leases[command["call"]] = @client.locks.acquire(command["key"], **options(command))
  end

  def renew(command)
    @leases[command["call"]] = @client.locks.renew(command["key"], lease(command), **options(command))
  end

  def release(command)
    @client.locks.release(command["key"], lease(command), **options(command))
  end

  def get(command)
    @client.locks.get(command["key"], **options(command))
  end

  def force_release(command)
    @client.locks.force_release(command["key"], **options(command))
  end

  def watch(command)
    call = command["call"]
    @client.locks.watch(**command.slice("key", "prefix").transform_keys(&:to_sym)) do |event|
      tell(event: "watched", call: call, **event.to_h, at: event.at && instant(event.at))
    end
  rescue Cancelled
    nil # so an iteration is left
  end

  def close(_command)
    @client.close
  end

  private

  def start(call)
    @threads[call] = Thread.new do
      Thread.current.report_on_exception = false
      result = yield
      tell(event: "returned", call: call, value: value(result))
    rescue Exception => error
      tell(event: "raised", call: call, **errors(error))
    end
  end

  # A body ends on `finish` alone; a cancellation that came before then goes on.
  def hold_out(finishes)
    finish = finishes.pop
    raise BodyError, finish["raise"] if finish.key?("raise")

    finish["return"]
  rescue Cancelled => cancelled
    finish = finishes.pop
    raise BodyError, finish["raise"] if finish.key?("raise")

    raise cancelled
  end

  def options(command)
    command.slice("ttl", "token", "request_id", "wait").transform_keys(&:to_sym)
  end

  def lease(command)
    given = command["lease"]
    return @leases.fetch(given) unless given.is_a?(Hash)

    expires_at = given["expires_at"] && Time.iso8601(given["expires_at"])
    Volcano::LockLease.new(key: given["key"], token: given["token"], fencing_token: given["fencing_token"], expires_at: expires_at)
  end

  # --- time -----------------------------------------------------------------------------------------

  def virtual
    @clock or raise Unsupported, "the clock is real"
  end

  def advance(command)
    quiet if virtual
    command["blocked"] ? @clock.jump(command["seconds"]) : @clock.advance(command["seconds"]) { quiet }
  end

  def look(call)
    quiet if @clock
    guard = @guards.fetch(call)
    { lost: guard.lost?, **value(guard.lease).slice(:fencing_token, :expires_at) }
  end

  def exchanges
    @session.transports.flat_map(&:exchanges)
  end

  def streams
    @session.transports.flat_map(&:streams)
  end

  # Until every other thread sleeps, several looks in a row, and nothing is there that would wake one.
  def quiet
    patience = Process.clock_gettime(Process::CLOCK_MONOTONIC) + QUIET_PATIENCE
    calm = 0
    while calm < 3
      raise "not quiet: #{restless}" if Process.clock_gettime(Process::CLOCK_MONOTONIC) > patience

      calm = restless.empty? ? calm + 1 : 0
      sleep(0.0002) if calm < 3
    end
  end

  def restless
    in_flight = exchanges
    busy = Thread.list.reject { |thread| thread == Thread.current || thread.status == "sleep" }
    # Interrupts wait while an exchange is seen through.
    interrupted = @threads.values.select { |thread| thread.alive? && thread.pending_interrupt? } - in_flight.map(&:thread)
    busy + interrupted + (in_flight + streams).reject(&:at_rest?)
  end

  # --- what is told ---------------------------------------------------------------------------------

  def tell(**fields)
    Driver.emit(**fields) unless @dropped
  end

  def value(result)
    case result
    when Volcano::LockLease
      { key: result.key, token: result.token, fencing_token: result.fencing_token, expires_at: instant(result.expires_at) }
    when Volcano::LockState
      return { held: false } unless result.held?

      { held: true, fencing_token: result.fencing_token, expires_at: instant(result.expires_at) }
    else result
    end
  end

  def instant(time)
    time.getutc.iso8601(3)
  end

  def errors(error)
    told = Volcano::Error.chain(error).map { |one| told(one) }
    { **told.first, errors: told }
  end

  def told(error)
    case error
    when ->(one) { one.instance_of?(Volcano::Error) && one.message == "this client is closed" } then { error: "Closed" }
    when Volcano::Error
      name = error.instance_of?(Volcano::Error) ? "VolcanoError" : error.class.name.split("::").last
      facts = { code: error.code, status: error.status, retry_after: error.retry_after, request_id: error.request_id }
      { error: name, message: error.message, **facts.compact }
    when ArgumentError then { error: "InvalidArgument", message: error.message }
    when BodyError then { error: "BodyError", message: error.message }
    when Cancelled then { error: "Cancelled" }
    else { error: "Unexpected", message: "#{error.class}: #{error.message}" }
    end
  end
end

# What the SDK logs is shown when a scenario fails.
module DriverLog
  def self.warn(sentence)
    $stderr.puts(sentence)
  end

  def self.debug(sentence)
    warn(sentence)
  end
end

def answer(command, driver)
  if command["cmd"] == "hello"
    driver&.drop
    driver = Driver.new(command)
    capabilities = Driver::CAPABILITIES + (command["clock"] == "virtual" ? ["virtual_clock"] : [])
    runtime = "#{RUBY_ENGINE} #{RUBY_VERSION}"
    Driver.emit(id: command["id"], ok: { sdk: "ruby", version: Volcano::VERSION, runtime: runtime, capabilities: capabilities })
  else
    later = nil
    Driver.emit(id: command["id"], ok: driver.do(command) { |step| later = step })
    later&.call
  end
  driver
rescue Unsupported => error
  Driver.emit(id: command["id"], unsupported: error.message)
  driver
rescue StandardError => error
  Driver.emit(id: command["id"], error: "#{error.class}: #{error.message}")
  driver
end

ENV.delete_if { |name, _value| name.start_with?("VOLCANO_") }
$stdin.set_encoding(Encoding::UTF_8)
$stdout.set_encoding(Encoding::UTF_8)
driver = nil
$stdin.each_line { |line| driver = answer(JSON.parse(line), driver) }
exit!(0) if driver&.busy? # else by itself: what the SDK leaves behind must not keep the process

# frozen_string_literal: true

if ENV["VOLCANO_TEST_GEM"]
  gem ENV["VOLCANO_TEST_GEM"]
end
require "minitest/autorun"
require "json"
require "timeout"
require "volcano"
require_relative "support/junit"
require_relative "support/manual_clock"
require_relative "support/scripted_server"
require_relative "support/real_server"

ENV.delete_if { |name, _value| name.start_with?("VOLCANO_") || name.downcase.end_with?("_proxy") }
trap("INT", "DEFAULT") # what a shell runs in the background ignores it, and so would the programs of the tests

# What all tests share. Warnings of our own code are errors, and no test runs for ever.
class VolcanoTest < Minitest::Test
  SECONDS = Integer(ENV.fetch("TEST_SECONDS", "30"))
  TABLES = File.expand_path("../../../conformance/tables", __dir__)
  TOKEN = "1b9d6bcd-bbfd-4b2d-9b5d-ab8dfbbd4bed"

  module Warnings
    OURS = %r{sdks/ruby|volcano}

    def self.seen
      @seen ||= []
    end

    def warn(message, **)
      Warnings.seen << message if message.match?(OURS)
      super
    end
  end
  Warning.extend(Warnings)
  Minitest.after_run { abort("warnings:\n#{Warnings.seen.join}") if Warnings.seen.any? }

  def run
    watchdog = Thread.new do
      sleep(SECONDS)
      warn("#{self.class}##{name} hangs:\n#{Thread.list.map { |thread| [thread.inspect, *thread.backtrace].join("\n  ") }.join("\n")}")
      exit!(70)
    end
    super
  ensure
    watchdog.kill.join
  end

  def table(name, part = "rows")
    JSON.parse(File.read(File.join(TABLES, "#{name}.json"))).fetch(part)
  end

  # Waits for a condition, bounded, in real time.
  def wait_until(seconds = 5, what = "the condition")
    over = Process.clock_gettime(Process::CLOCK_MONOTONIC) + seconds
    until (value = yield)
      flunk("#{what} did not come true within #{seconds} s") if Process.clock_gettime(Process::CLOCK_MONOTONIC) > over
      sleep(0.002)
    end
    value
  end

  # How long the block takes, in real seconds.
  def seconds
    start = Process.clock_gettime(Process::CLOCK_MONOTONIC)
    yield
    Process.clock_gettime(Process::CLOCK_MONOTONIC) - start
  end

  def client(url, **settings)
    client = Volcano::Client.new(api_url: url, service_key: "sk-test", proxy: nil, **settings)
    (@clients ||= []) << client
    client
  end

  def teardown
    (@clients || []).each { |one| one.close rescue nil } # rubocop:disable Style/RescueModifier -- the test is over
  end
end

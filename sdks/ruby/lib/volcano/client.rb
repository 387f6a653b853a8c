# frozen_string_literal: true

require "uri"
require "volcano/clock"
require "volcano/discreet"
require "volcano/fork"
require "volcano/keeper"
require "volcano/locks"
require "volcano/transport"
require "volcano/waiting_room"

module Volcano
  # Credentials, settings and `.locks`. One client serves all threads of a process, and its forks.
  #
  #   Volcano::Client.new do |client|       # settings from the environment; closed at the end
  #     client.locks.with_lock("nightly", ttl: 30) { … }
  #   end
  class Client
    DEFAULT_TIMEOUT = 10

    # @return [Locks]
    attr_reader :locks

    # @param service_key [String, nil] `sk-…`; else VOLCANO_SERVICE_KEY. Locks need it
    # @param anon_key [String, nil] `ak-…`; else VOLCANO_ANON_KEY. Not used for locks
    # @param api_url [String, nil] else VOLCANO_API_URL
    # @param timeout [Numeric] seconds that one try of a call may take at most
    # @param logger [Logger, nil] told (`debug`, `warn`) what no caller would hear of, never a secret
    # @param proxy [:environment, String, nil] `:environment`: as http_proxy, https_proxy and no_proxy say;
    #   nil: none, whatever the environment says; or the proxy's URL
    # @yieldparam client [Client] closed after the block
    # @return [Client] or with a block what that returns
    # @raise [ArgumentError] for settings that cannot be right
    def self.new(**settings)
      client = super
      return client unless block_given?

      begin
        yield client
      ensure
        client.close
      end
    end

    # @api private
    def initialize(anon_key: nil, service_key: nil, api_url: nil, timeout: DEFAULT_TIMEOUT, logger: nil, proxy: :environment, clock: nil)
      @anon_key = credential("anon_key", anon_key || from_environment("VOLCANO_ANON_KEY"))
      @service_key = credential("service_key", service_key || from_environment("VOLCANO_SERVICE_KEY"))
      @uri = checked_url(api_url || from_environment("VOLCANO_API_URL"))
      @timeout = checked_timeout(timeout)
      @logger = logger
      @proxy = checked_proxy(proxy)
      @clock = clock
      @mutex = Mutex.new
      @closed = false
      @session = nil
      @locks = Locks.new(self)
    end

    # Ends all that this client holds and does: calls that wait raise, watches end, the guards of its running `with_lock`s are
    # lost, then each of their leases is released. Leases of `acquire` are the caller's and stay.
    #
    # @raise [Error] the first release that failed; the others were tried all the same
    # @return [void]
    def close
      return if @closed

      @closed = true
      session = @session
      return unless session&.mine?

      session.waiting_room.close
      failures = @locks.release_all(session)
      session.close
      Fork.unwatch(self)
      raise failures.first, cause: failures.first.cause unless failures.empty?
    end

    # Silent about credentials.
    def inspect
      "#<#{self.class} #{@uri.scheme}://#{@uri.host}:#{@uri.port}#{@uri.path}>"
    end
    alias to_s inspect

    # @return [String] the service key
    # @raise [Error::AuthenticationError] without one
    # @api private
    def service_key
      @service_key or raise Error::AuthenticationError.new(
        "locks need a service key: pass service_key: (sk-…) or set VOLCANO_SERVICE_KEY", code: "authentication_required"
      )
    end

    # What one process has of this client; a forked child gets its own.
    # @api private
    def session
      raise Error, "this client is closed" if @closed

      session = @session
      return session if session&.mine?

      Shield.up do
        # A mutex that another thread held in the parent is free in the child.
        @mutex.synchronize do
          @session = open_session unless @session&.mine?
          @session
        end
      end
    end

    # Tells the log, at most; never raises.
    # @api private
    def log(level, sentence)
      @logger&.public_send(level, "volcano: #{sentence}")
    rescue StandardError
      nil # a log that fails must not cost a lock
    end

    # @api private
    attr_reader :timeout

    # Everything that belongs to one process: connections, threads, held locks.
    # @api private
    class Session
      include Discreet

      attr_reader :clock, :transport, :keeper, :waiting_room

      def initialize(clock:, transport:, renewals:, keeper:, waiting_room:, pid:)
        @clock = clock
        @transport = transport
        @renewals = renewals
        @keeper = keeper
        @waiting_room = waiting_room
        @pid = pid
      end

      def mine?
        @pid == Process.pid
      end

      # The connections of calls and those of renewals, which never wait for each other.
      def transports
        [@transport, @renewals]
      end

      def close
        transports.each(&:close)
        @keeper.close
      end
    end

    private

    def open_session
      pid = Process.pid
      clock = @clock || SystemClock.new
      transport, renewals = [true, false].map { |openers| Transport.new(@uri, proxy: @proxy, clock: clock, openers: openers) }
      keeper = Keeper.new(
        clock: clock, transport: renewals, timeout: @timeout, mine: -> { pid == Process.pid },
        sender: @locks.method(:sender), log: ->(sentence) { log(:warn, sentence) }
      )
      waiting_room = WaitingRoom.new(
        clock: clock, transport: transport, timeout: @timeout, sender: @locks.method(:sender), log: ->(sentence) { log(:warn, sentence) }
      )
      Fork.watch(self, [transport, renewals])
      Session.new(clock: clock, transport: transport, renewals: renewals, keeper: keeper, waiting_room: waiting_room, pid: pid)
    end

    def from_environment(name)
      value = ENV.fetch(name, nil)
      value unless value.nil? || value.strip.empty?
    end

    def credential(name, value)
      return if value.nil?
      return value.dup.freeze if value.is_a?(String) && value.match?(/\A[!-~]+\z/)

      raise ArgumentError, "#{name} must be a string of printable ASCII characters without spaces; got a #{value.class} that is none"
    end

    def checked_url(url)
      if url.nil?
        raise ArgumentError, "api_url is missing: pass api_url: or set VOLCANO_API_URL; " \
                             "`volcano-server dev` starts a local server and prints its URL"
      end
      uri = parsed_url(url)
      return uri if uri && uri.userinfo.nil? && uri.query.nil? && uri.fragment.nil?

      raise ArgumentError, "api_url must be an http or https URL without credentials, query and fragment, " \
                           "such as http://127.0.0.1:8000; got #{uri&.userinfo ? "one with credentials" : url.inspect}"
    end

    def parsed_url(url)
      uri = URI.parse(url)
      uri if uri.is_a?(URI::HTTP) && !uri.host.to_s.empty?
    rescue URI::Error
      nil
    end

    def checked_timeout(timeout)
      return timeout.to_f if timeout.is_a?(Numeric) && timeout.real? && timeout.to_f.finite? && timeout.positive?

      raise ArgumentError, "timeout must be a positive number of seconds; got #{timeout.inspect}"
    end

    def checked_proxy(proxy)
      return if proxy.nil?
      return @uri.find_proxy if proxy == :environment

      parsed_url(proxy) or raise ArgumentError, "proxy must be :environment, nil or the URL of a proxy"
    end
  end
end

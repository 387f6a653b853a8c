# frozen_string_literal: true

require "securerandom"
require "volcano/discreet"
require "volcano/operations"
require "volcano/renewal"
require "volcano/shield"
require "volcano/waiting"

module Volcano
  # One acquire, from its first send to a lease or an error, and what its caller must know if it is interrupted on the
  # way.
  #
  # With `wait` it is several tries, one after the other. Each is an operation of its own, with one lock token for all of
  # them, as long as no release was sent for it: docs/semantics.md#waiting.
  # @api private
  class Acquisition
    include Discreet

    # error: why there is no lease; also when it was granted too late to be of use.
    attr_reader :session, :key, :ttl, :token, :error

    # @param own_token [String, nil] the caller's
    # @param wait [Float] seconds to wait for a key that is held; 0.0: none
    # @param recoverable [Boolean] may the caller recover an unknown lease with that token? Then none is given back
    def initialize(client, key:, ttl:, own_token:, request_id:, wait:, recoverable:)
      @client = client
      @key = key
      @ttl = ttl
      @own_token = own_token
      @token = own_token || new_token
      @first = request(request_id)
      @session = client.session
      @wait = wait
      @recoverable = recoverable
      @flow = nil
      @error = nil
    end

    # Sends. The block, if any, is given a good answer under the shield.
    def run(&taken)
      over_at = @session.clock.now + @wait
      try(@first, &taken)
      wait_until(over_at, &taken) if @wait.positive? && @error.is_a?(Error::ConflictError)
    end

    def lease
      @flow.acquired.grant.lease(@key, @token)
    end

    # Sends a release, if the server may have granted a lease. A failure is only logged.
    def give_back
      return unless to_be_given_back?

      release = @client.locks.release_whole(@session, @key, @token, tries: 2)
      @client.log(:warn, "the lock #{@key.inspect} may stay taken for #{@ttl} s: #{release.error.message}") if release.error
    end

    private

    def new_token
      SecureRandom.uuid.freeze
    end

    def request(request_id = nil)
      Operations.acquire(@key, ttl: @ttl, token: @token, **@client.locks.sender(request_id))
    end

    # Sends one operation to its end.
    def try(request)
      @flow = flow = Operations::AcquireFlow.new(request, ttl: @ttl, timeout: @client.timeout)
      while (attempt = flow.next_try)
        @session.keeper.sent([@key, @token], @ttl)
        @session.transport.see_through(attempt, patience: Operations::EXIT_TRY_SECONDS) do |outcome|
          flow.take(outcome)
          granted(flow.acquired) { |acquired| yield acquired if block_given? } if flow.acquired
        end
      end
      @error = flow.error || too_late
    end

    def granted(acquired)
      @session.keeper.answered([@key, @token], acquired.grant)
      yield acquired
    end

    def too_late
      return if @session.clock.now < Renewal::Trust.begun(@flow.acquired, @ttl).stop_at

      Error::TransportError.new("acquire was answered too late to hold the lock")
    end

    def to_be_given_back?
      !@recoverable && @session.mine? && @flow && (@flow.acquired || @flow.unknown?)
    end

    # --- waiting -----------------------------------------------------------------------------------

    # Tries again whenever that may help, until it is over. `error` is then what was heard last.
    def wait_until(over_at, &taken)
      contention = @error
      @session.waiting_room.enter(@key, over_at) do |waiter|
        goes_on = true
        while goes_on && (step = waiter.next_step) != :give_up
          goes_on = step == :try ? try_again(waiter, &taken) : poll(waiter)
          contention = @error if @error.is_a?(Error::ConflictError)
        end
        @error = waiter.turn.trouble || contention if goes_on
      end
    end

    # Returns whether to wait on.
    def try_again(waiter, &taken)
      return false if @own_token && @client.locks.spent?(@own_token)

      try(request, &taken)
      if @error.nil? || (taken && @flow.acquired) || @error.is_a?(Error::ConflictError)
        waiter.held # by this call or another
        return @error.is_a?(Error::ConflictError)
      end
      case @error
      when *Waiting::PASSING
        return false unless start_afresh

        waiter.failed(@error)
      else return false
      end
      true
    end

    # After an unknown outcome the next try needs another token. False where it is the caller's: there is none.
    def start_afresh
      return true unless to_be_given_back?
      return false if @own_token

      Shield.up do
        give_back
        @flow = nil
        @token = new_token
      end
      true
    end

    # Returns whether to wait on.
    def poll(waiter)
      request = Operations.get(@key, **@client.locks.sender)
      timeout = Waiting.poll_timeout(@client.timeout, waiter.turn.over_at - @session.clock.now)
      outcome = @session.transport.call(Operations::Try.new(request: request, timeout: timeout))
      state = Operations.state(request, outcome)
      waiter.read(state)
      true
    rescue *Waiting::PASSING => error
      waiter.not_read(error)
      true
    rescue Error => error
      @error = error
      false
    end
  end
end

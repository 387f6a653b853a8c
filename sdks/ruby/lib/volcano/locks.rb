# frozen_string_literal: true

require "securerandom"
require "volcano/acquisition"
require "volcano/discreet"
require "volcano/guard"
require "volcano/operations"
require "volcano/shield"
require "volcano/waiting"
require "volcano/watch"

module Volcano
  # The lock operations: `client.locks`. Any thread may call them.
  #
  # Arguments that cannot be right raise ArgumentError before anything is sent. Times are seconds.
  # The rules: docs/semantics.md. Below the calls stands the life of one `with_lock`.
  class Locks
    # Tokens for which a release was sent are remembered, so many of them.
    SPENT_TOKENS = 10_000
    private_constant :SPENT_TOKENS

    # @api private
    def initialize(client)
      @client = client
      @mutex = Mutex.new
      @spent = {} # {"1b9d…" => true} in the order of their releases
    end

    # Takes the lock and returns its lease. The caller renews and releases it; `with_lock` does both for you.
    #
    # @param key [String] the lock's name
    # @param ttl [Integer] seconds that the lease lasts, 5 to 7 776 000
    # @param token [String, nil] a lock token (UUID) of your own: repeating the call with it, after an error
    #   too, gives the same lease. Absent: a new one
    # @param request_id [String, nil] a UUID for the server's log; of the first try, where `wait` makes it several
    # @param wait [Numeric] seconds to wait at most while somebody else holds the lock; Float::INFINITY: as long as it
    #   takes. The lease's time starts with the try that gets it
    # @return [LockLease]
    # @raise [Error::ConflictError] somebody else holds the lock
    def acquire(key, ttl:, token: nil, request_id: nil, wait: 0)
      # With the caller's own token the caller can recover; a token that nobody knows would block the key.
      call = acquisition(key, ttl, token, request_id, wait, recoverable: !token.nil?)
      begin
        call.run
        raise call.error, cause: call.error.cause if call.error

        lease = call.lease
      ensure
        Shield.up { call.give_back } unless lease
      end
    end

    # Extends a lease by `ttl` seconds from now.
    #
    # @param lease [LockLease] of this very key
    # @return [LockLease] a new one
    # @raise [Error::ConflictError] the lease is over
    def renew(key, lease, ttl:, request_id: nil)
      key, lease = of_this_key(key, lease)
      ttl = Operations.checked_ttl(ttl)
      request = Operations.renew(key, ttl: ttl, token: lease.token, **sender(request_id))
      session = @client.session
      lease_key = [key, lease.token]
      session.keeper.sent(lease_key, ttl)
      begin
        grant = Operations.granted(request, send_once(session, request))
      rescue Error::ConflictError => error
        session.keeper.refused(lease_key, error)
        raise
      end
      session.keeper.answered(lease_key, grant)
      grant.lease(key, lease.token)
    end

    # Gives a lease back. Releasing one that is already over is no error while nobody else has the key.
    #
    # @param lease [LockLease] of this very key
    # @return [nil]
    # @raise [Error::ConflictError] somebody else holds the lock by now
    def release(key, lease, request_id: nil)
      key, lease = of_this_key(key, lease)
      request = Operations.release(key, token: lease.token, **sender(request_id))
      session = @client.session
      spend(lease.token)
      session.keeper.releasing([key, lease.token])
      Operations.released(request, send_once(session, request))
      session.keeper.released([key, lease.token])
      nil
    end

    # Looks at a key.
    #
    # @return [LockState]
    def get(key, request_id: nil)
      key = Operations.checked_key(key)
      request = Operations.get(key, **sender(request_id))
      Operations.state(request, send_once(@client.session, request))
    end

    # Frees a key, whoever holds it. For operators: the displaced holder learns of it at its next renewal.
    #
    # @return [nil]
    def force_release(key, request_id: nil)
      key = Operations.checked_key(key)
      request = Operations.force_release(key, **sender(request_id))
      Operations.released(request, send_once(@client.session, request))
      nil
    end

    # Takes the lock, runs the block, and gives the lock back however the block ends: `next`, `break`,
    # `return`, `throw`, an error, a timeout, a signal. Meanwhile the lease is renewed.
    #
    # An error of the block goes up as it is. When the lock was lost too, the LockLostError stands at the
    # end of that error's chain of causes, as does a release that failed.
    #
    # @param wait [Numeric] as of `acquire`
    # @yieldparam guard [LockGuard]
    # @return what the block returns
    # @raise [Error::ConflictError] somebody else holds the lock; the block did not run
    # @raise [Error::LockLostError] the lock was lost, whatever the block returned
    def with_lock(key, ttl:, token: nil, request_id: nil, wait: 0)
      raise ArgumentError, "with_lock needs a block" unless block_given?

      tenure = Tenure.new(@client, acquisition(key, ttl, token, request_id, wait, recoverable: false))
      begin
        yield tenure.begin
      rescue Exception => error # `$!` in the ensure would not do: it may be an older error
        tenure.error = error
        raise
      ensure
        Shield.up { tenure.end }
      end
    end

    # What becomes of locks, as it happens, for as long as you ask: `acquired`, `released`, `force_released`, `lapsed`, and
    # `reset` where events may be missing. Nothing is sent before the first is asked for.
    #
    #   client.locks.watch(prefix: "job-").each { |event| break if event.type == :released }
    #
    # The iteration has a connection of its own, opens another when that is lost, and ends it with itself: by `break` or an
    # interrupt. After `next` it stays open; `rewind` ends it, and so does the garbage collector.
    #
    # @param key [String, Array<String>, nil] locks to watch
    # @param prefix [String, Array<String>, nil] beginnings of the names of locks to watch; 64 of both at most
    # @yieldparam event [LockEvent]
    # @return [Enumerator] of LockEvents; with a block what that `break`s with
    # @raise [Error::NotFoundError] from the iteration: the server has no events
    def watch(key: nil, prefix: nil, &block)
      watch = Watch.new(@client, Events::Filters.checked(key, prefix))
      block ? watch.each(&block) : watch.to_enum
    end

    def inspect
      "#<#{self.class} of #{@client.inspect}>"
    end
    alias to_s inspect

    # What every request says of its sender: a new request id, unless one is given, and the credential.
    # @api private
    def sender(request_id = nil)
      {
        request_id: request_id.nil? ? SecureRandom.uuid.freeze : Operations.checked_request_id(request_id),
        service_key: @client.service_key
      }
    end

    # Sends a release for a lease of the SDK's own, up to the end: an interrupt that comes through the shield
    # costs one try. Returns the finished ReleaseFlow.
    # @api private
    def release_whole(session, key, token, tries:)
      spend(token)
      request = Operations.release(key, token: token, **sender)
      see_through(session, flow = Operations::ReleaseFlow.new(request, tries: tries))
      flow
    end

    # At a close: what all running with_locks hold is lost, then released. Returns the errors.
    # @api private
    def release_all(session)
      session.keeper.lose_all("was lost: its client was closed").filter_map do |kept|
        Shield.up do
          key, token = kept.lease_key
          flow = release_whole(session, key, token, tries: 1)
          session.keeper.released(kept.lease_key)
          flow.error
        end
      end
    end

    # Whether a release was sent for that lock token.
    # @api private
    def spent?(token)
      @mutex.synchronize { @spent.key?(token) }
    end

    private

    def acquisition(key, ttl, token, request_id, wait, recoverable:)
      key = Operations.checked_key(key)
      ttl = Operations.checked_ttl(ttl)
      wait = Waiting.checked_wait(wait)
      own_token = token && unspent(Operations.checked_token(token))
      Acquisition.new(@client, key: key, ttl: ttl, own_token: own_token, request_id: request_id, wait: wait, recoverable: recoverable)
    end

    def of_this_key(key, lease)
      key = Operations.checked_key(key)
      [key, Operations.checked_lease(key, lease)]
    end

    def send_once(session, request)
      session.transport.call(Operations::Try.new(request: request, timeout: @client.timeout))
    end

    def see_through(session, flow)
      while (attempt = flow.next_try)
        session.transport.see_through(attempt) { |outcome| flow.take(outcome) }
      end
    ensure
      see_through(session, flow) if flow.next_try
    end

    def spend(token)
      Shield.up do
        @mutex.synchronize do
          @spent.delete(token)
          @spent[token] = true
          @spent.shift if @spent.size > SPENT_TOKENS
        end
      end
    end

    def unspent(token)
      return token unless spent?(token)

      raise ArgumentError, "token was released before and cannot acquire again: make a new one (SecureRandom.uuid)"
    end

    # One `with_lock`: begins with the acquire and ends, whatever happens, with the release.
    # @api private
    class Tenure
      include Discreet

      # The error that ended the block or kept it from starting; nil for every other way out.
      attr_writer :error

      def initialize(client, acquisition)
        @client = client
        @acquisition = acquisition
        @session = acquisition.session
        @keeper = @session.keeper
        @kept = nil
        @error = nil
      end

      # Takes the lock. Returns the guard; raises where the block must not start.
      def begin
        @acquisition.run { |acquired| take_up(acquired) }
        unless @kept
          error = @acquisition.error
          raise error, cause: error.cause
        end
        loss = @keeper.wait_until_fresh(@kept)
        raise loss.again, cause: loss.cause if loss

        LockGuard.new(@keeper, @kept)
      end

      # Gives the lock back and tells of its loss. Under the shield.
      def end
        return @acquisition.give_back unless @kept
        return report(@kept.holding.forked) unless @kept.mine?

        loss = @keeper.finish(@kept)
        loss = release(loss) || loss unless @kept.holding.released
        report(loss) if loss
      end

      private

      def take_up(acquired)
        @keeper.take_up(@acquisition.key, @acquisition.token, @acquisition.ttl, acquired) { |kept| @kept = kept }
      rescue ThreadError => error
        raise Error, "the lock was given back: no thread to renew it could be started", cause: error
      end

      # Sends the release. Returns the loss that its refusal stands for.
      def release(loss)
        flow = @client.locks.release_whole(@session, *@kept.lease_key, tries: loss ? 1 : 2)
        @keeper.released_by_another(@kept.lease_key) if flow.released?
        error = flow.error or return
        return @kept.holding.release_refused(error) if error.is_a?(Error::ConflictError) && loss.nil?

        @client.log(:warn, "the lock #{@acquisition.key.inspect} may stay taken for #{@acquisition.ttl} s: #{error.message}")
        Error.put_beside(@error, error) if @error && loss.nil?
        nil
      end

      # A killed thread goes on dying.
      def report(loss)
        if @error
          Error.put_beside(@error, loss) unless loss.travels_with?(@error)
        elsif Thread.current.status == "aborting"
          @client.log(:warn, loss.message)
        else
          raise loss.again, cause: loss.cause
        end
      end
    end
    private_constant :Tenure
  end
end

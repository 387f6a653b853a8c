# frozen_string_literal: true

require "volcano/discreet"
require "volcano/operations"

module Volcano
  # When to renew, and until when to trust a lease. Pure: `now`, jitter and answers go in.
  #
  #   send          ttl/3 ±10 %        stop time    deadline                        + 1 s
  #   |--- trusted --- renewal due --- tries --- | -- margin -- | server: lapsed -- | somebody else's
  #   ^ the deadline counts from here: the send of the try that was answered well
  #
  # All times are seconds of the local suspend-aware clock; the server's `expires_at` is for people.
  # The rules in words: docs/semantics.md#local-deadline, #renewal, #retries.
  # The formulas as data, the same in every SDK: conformance/tables/renewal_delay.json.
  # @api private
  module Renewal
    # The server's hard deadline of 90 days less a thousandth: clocks may have drifted apart.
    LONGEST_TRUST = 89.91 * 86_400
    FINAL = [400, 401, 403, 404, 409].freeze

    module_function

    # Seconds from the send of the last success to the next renewal.
    # A third of the TTL, ±10 % by `jitter` (-1 to 1). Where the server left less than the TTL, half of
    # what `remaining` from that send to the stop time, so that a renewal still fits.
    def renewal_delay(ttl, remaining, jitter)
      [[ttl / 3.0 * (1 + 0.1 * jitter), remaining / 2.0].min, 0.5].max
    end

    # Seconds from the send of a failed try to the next; `failures` in a row, 1 or more.
    # `remaining`: from the send of the failed try to the stop time. `jitter`: -1 to 1.
    def retry_delay(ttl, failures, remaining, jitter)
      longest = [ttl / 10.0, [5.0, ttl / 100.0].max].min
      delay = [0.1 * 2.0**[failures - 1, 60].min, longest].min * (1 + 0.5 * jitter)
      [delay, [remaining / 2.0, 0.1].max].min
    end

    # How long one renewal try may take: room for two more in what `remaining` to the stop time.
    def try_timeout(remaining, client_timeout)
      [[remaining / 3.0, [0.5, remaining / 2.0].min].max, client_timeout].min
    end

    # By how many seconds a renewal may be brought forward, to share a request with others.
    def leeway(ttl)
      [0.5, ttl / 30.0].min
    end

    # Until when the holder may act. `ttl`: the shortest that any request of the lease carried.
    Trust = Struct.new(:first_sent_at, :ttl, :deadline, keyword_init: true) do
      # From a good acquire; of two tries of it, the lease is as old as the first.
      def self.begun(acquired, ttl)
        new(first_sent_at: acquired.first_sent_at, ttl: ttl, deadline: -Float::INFINITY).answered(acquired.grant)
      end

      def initialize(**)
        super
        freeze
      end

      # From here on no renewal can help.
      def stop_at
        deadline - [1.0, ttl / 1000.0].max
      end

      # A request with this TTL went out: if it shortens the lease, it does so from now on.
      def sent(at, ttl)
        return self if ttl >= self.ttl && at + ttl >= deadline

        with(ttl: [self.ttl, ttl].min, deadline: [deadline, at + ttl].min)
      end

      # A good answer, also a late one: worth its send time and the shortest TTL, never less than what
      # was trusted before.
      def answered(grant)
        worth = grant.sent_at + [ttl, grant.expires_in].compact.min
        with(deadline: [deadline, [worth, first_sent_at + LONGEST_TRUST].min].max)
      end

      private

      def with(**changes)
        self.class.new(**to_h, **changes)
      end
    end

    # When the next renewal is sent; `due_at` is infinite when none will be.
    Schedule = Struct.new(:due_at, :failures, :is_last, keyword_init: true) do
      def self.after_success(trust, sent_at:, jitter:)
        new(due_at: sent_at + Renewal.renewal_delay(trust.ttl, trust.stop_at - sent_at, jitter))
      end

      def initialize(due_at:, failures: 0, is_last: false)
        super
        freeze
      end

      def not_after(moment)
        self.class.new(due_at: [due_at, moment].min, failures: failures, is_last: is_last)
      end

      def after_failure(trust, sent_at:, now:, jitter:, retry_after: nil)
        return self.class.new(due_at: Float::INFINITY, failures: failures + 1, is_last: true) if is_last

        due_at = sent_at + Renewal.retry_delay(trust.ttl, failures + 1, trust.stop_at - sent_at, jitter)
        if retry_after && now + retry_after >= trust.stop_at
          # The server wants us back when it is too late: one last try, midway.
          midway = now + (trust.stop_at - now) / 2
          return self.class.new(due_at: [due_at, midway].max, failures: failures + 1, is_last: true)
        end
        self.class.new(due_at: [due_at, now + (retry_after || 0.0)].max, failures: failures + 1)
      end
    end

    # One held lock, from its grant to its end: what it knows, never what time it is.
    #
    #   held ── refused, another fencing token, stop time, closed ──> lost      (announced once)
    #     └──── the body ended, or our own release was sent ────────> ended     (never lost any more)
    #
    # Not thread-safe; the Keeper guards it with its mutex.
    class Holding
      include Discreet

      # ttl: of the call; lease: the LockLease as last answered; loss: the LockLostError, or nil.
      attr_reader :ttl, :lease, :trust, :schedule, :loss
      # Ended: the body is over, or a release was sent. Released: a release succeeded, the exit sends none.
      attr_accessor :ended, :released

      # shortest_ttl: of all calls with this lock token.
      def initialize(key, token, ttl, acquired, jitter:, shortest_ttl: ttl)
        @ttl = ttl
        @lease = acquired.grant.lease(key, token)
        @trust = Trust.begun(acquired, shortest_ttl)
        @schedule = Schedule.after_success(@trust, sent_at: acquired.grant.sent_at, jitter: jitter)
        @loss = nil
        @ended = false
        @released = false
        @latest_failure = nil
      end

      def live?
        @loss.nil? && !@ended
      end

      # The loss, if there is one by `now`. Every question about the lock comes through here.
      def look(now)
        lose("was not renewed in time", because: @latest_failure) if live? && now >= @trust.stop_at
        @loss
      end

      # The first loss counts; after the end there is none. `refusal`: the answer that it came with.
      def lose(how, refusal: nil, because: refusal)
        @loss = lost(how, refusal, because) if live?
      end

      # Our release was answered 409 and no loss was known: we had lost it unawares.
      def release_refused(refusal)
        @loss ||= lost("was lost: its release was refused", refusal, refusal)
      end

      # What the child of a fork is told: the lease stays with the parent.
      def forked
        lost("belongs to the process that this one was forked from", nil, nil)
      end

      # May its renewal be sent now, along with others? A try after a failure is never brought forward.
      def may_join?(now)
        live? && @schedule.due_at - (@schedule.failures.zero? ? Renewal.leeway(@trust.ttl) : 0.0) <= now
      end

      # The try to send at `now`.
      def renewal(request, now, client_timeout)
        sent(now, @ttl)
        Operations::Try.new(request: request, timeout: Renewal.try_timeout(@trust.stop_at - now, client_timeout))
      end

      # A request of this lease went out, also one of a direct call with the same token. One with a shorter TTL
      # brings the next renewal forward, in case its answer is lost.
      def sent(at, ttl)
        longer = @trust.ttl
        @trust = @trust.sent(at, ttl)
        return unless @trust.ttl < longer

        @schedule = @schedule.not_after(at + Renewal.renewal_delay(@trust.ttl, @trust.stop_at - at, 0.0))
      end

      # What became of a renewal try.
      def renewed(request, outcome, now:, jitter:)
        return if look(now) || @ended

        answered(Operations.granted(request, outcome), jitter: jitter)
      rescue Error => error
        return lose("was lost: its renewal was refused", refusal: error) if FINAL.include?(error.status)

        @latest_failure = error
        @schedule = @schedule.after_failure(
          @trust, sent_at: outcome.sent_at, now: now, jitter: jitter, retry_after: error.retry_after
        )
      end

      # A good answer about this lease, to its own renewal or to a direct call.
      def answered(grant, jitter:)
        return unless live?
        if grant.fencing_token != @lease.fencing_token
          return lose("was lost: it now has the fencing token #{grant.fencing_token}")
        end

        @latest_failure = nil
        @trust = @trust.answered(grant)
        @lease = grant.lease(@lease.key, @lease.token)
        @schedule = Schedule.after_success(@trust, sent_at: grant.sent_at, jitter: jitter)
      end

      private

      def lost(how, refusal, cause)
        loss = Error::LockLostError.new(
          "the lock #{@lease.key.inspect} (fencing token #{@lease.fencing_token}) #{how}",
          status: refusal&.status, code: refusal&.code, request_id: refusal&.request_id
        )
        Error.with_cause(loss, cause)
      end
    end
  end
end

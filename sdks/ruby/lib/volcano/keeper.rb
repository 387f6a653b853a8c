# frozen_string_literal: true

require "volcano/discreet"
require "volcano/operations"
require "volcano/renewal"
require "volcano/shield"

module Volcano
  # Keeps the held locks of one client: renews each in time, notices each loss, tells whoever should know.
  #
  # Its threads: the clock's one for timers, and up to seven workers, which renew (the lease with least
  # left first) and call the users' `on_lost` blocks. All of them start on demand and leave when there is
  # nothing to do; there is never a thread per lock.
  #
  # One mutex guards all of it, which is why it is one file: a lock's state, its timers and the workers' queue change
  # together or not at all. Nobody does I/O or runs a user's block while holding that mutex.
  # @api private
  class Keeper
    include Discreet

    WORKERS = 7
    # Users' blocks may take their time; so many workers at most run them, the others renew.
    CALLING_WORKERS = 3
    # How long a worker stays when there is nothing to do.
    LINGER_SECONDS = 1.0
    # With all workers busy, a renewal that has had so long gives way to one with much less left.
    ROOM_SECONDS = 0.5
    # The shortest TTL that was sent is remembered for so many lock tokens.
    TOKENS = 10_000

    # A held lock and what hangs on it. Made by `take_up`; its fields belong to the keeper.
    class Kept
      include Discreet

      attr_reader :holding, :first_lease, :was_late, :changed, :calls
      # request: of the due renewal, from its first try to its success; exchange: of the try under way.
      attr_accessor :stop_timer, :due_timer, :request, :exchange, :renewing, :announced

      def initialize(holding, now, mine)
        @holding = holding
        @first_lease = holding.lease
        @was_late = holding.schedule.due_at <= now # the grant took so long that a renewal was due at once
        @mine = mine
        @changed = ConditionVariable.new # after each renewal, at the loss, at the end
        @calls = [] # the on_lost blocks
        @renewing = false # queued for a worker, or with one
        @announced = false
      end

      # What every request of this lease is known by.
      def lease_key
        [@first_lease.key, @first_lease.token]
      end

      # Does it belong to this process? (Not in the child of a fork.)
      def mine?
        @mine.call
      end
    end

    # @param request [Proc] (lease, ttl) -> the Request of a new renewal
    # @param log [Proc] told a sentence about what nobody else would hear of
    def initialize(clock:, transport:, timeout:, mine:, request:, log:)
      @clock = clock
      @transport = transport
      @timeout = timeout
      @mine = mine
      @request = request
      @log = log
      @mutex = Mutex.new
      @kept = {} # {["nightly", "1b9d…"] => [Kept, …]} running with_locks
      @ttls = {} # {["nightly", "1b9d…"] => 30} the shortest that was sent
      @due = [] # [Kept, …] whose renewal should be sent
      @calls = [] # [Proc, …] on_lost blocks to be called
      @work = ConditionVariable.new
      @workers = [] # [Thread, …]
      @under_way = [] # [Kept, …] whose renewal a worker has sent
      @room_timer = nil
      @idle = 0
      @closed = false
      @calling = 0
    end

    # --- the life of a lock ------------------------------------------------------------------------

    # Keeps a lock from its grant on; the block is given it before anything can fail.
    # Raises ThreadError when nothing could ever renew it.
    def take_up(key, token, ttl, acquired)
      synchronize do
        shortest = [ttl, @ttls[[key, token]]].compact.min
        holding = Renewal::Holding.new(key, token, ttl, acquired, jitter: jitter, shortest_ttl: shortest)
        kept = Kept.new(holding, @clock.now, @mine)
        yield kept
        (@kept[kept.lease_key] ||= []) << kept
        start_worker if @workers.none?(&:alive?)
        settle(kept)
      end
    end

    # Where a renewal was due at the grant: waits until one was answered. Returns the loss, if that came first.
    def wait_until_fresh(kept)
      if kept.was_late
        @mutex.synchronize do
          kept.changed.wait(@mutex) while held?(kept) && kept.holding.lease.equal?(kept.first_lease)
        end
      end
      look(kept)
    end

    # The body is over: nothing is renewed or lost from here on. Returns the loss, if there was one.
    def finish(kept)
      synchronize do
        loss = kept.holding.look(@clock.now)
        kept.holding.ended = true
        forget(kept)
        settle(kept)
        loss
      end
    end

    # Makes `how` the loss of all locks. Returns those that are to be released.
    def lose_all(how)
      synchronize do
        @kept.values.flatten.reject { |kept| kept.holding.ended }.each do |kept|
          kept.holding.lose(how)
          settle(kept)
        end
      end
    end

    # Lets the workers leave as soon as nothing is left to do.
    def close
      synchronize do
        @closed = true
        @work.broadcast
      end
    end

    # --- questions of a guard ----------------------------------------------------------------------

    # The loss, if there is one by now.
    def look(kept)
      synchronize do
        settle(kept) unless held?(kept)
        kept.holding.loss
      end
    end

    # Waits until the lock is lost or its body is over; `timeout` seconds at most, where given.
    def wait_lost(kept, timeout)
      over = timeout && @clock.now + timeout
      timer = over && @clock.at(over) { synchronize { kept.changed.broadcast } }
      @mutex.synchronize do
        kept.changed.wait(@mutex) while held?(kept) && (over.nil? || @clock.now < over)
      end
      look(kept)
    ensure
      timer&.cancel
    end

    # Calls the block with the loss, once, on a worker; also when it is lost already.
    def on_lost(kept, call)
      synchronize do
        kept.announced ? enqueue_call(kept, call) : kept.calls << call
      end
    end

    # --- what else happens to a lease --------------------------------------------------------------

    # A request with this TTL is about to be sent for a lease, which may be held already or only later.
    def sent(lease_key, ttl)
      synchronize do
        @ttls[lease_key] = [ttl, @ttls.delete(lease_key)].compact.min
        @ttls.shift if @ttls.size > TOKENS
      end
      each_kept(lease_key) { |kept| kept.holding.sent(@clock.now, ttl) }
    end

    # A direct call was answered well.
    def answered(lease_key, grant)
      each_kept(lease_key) { |kept| kept.holding.answered(grant, jitter: jitter) }
    end

    # A direct renewal was refused.
    def refused(lease_key, error)
      each_kept(lease_key) { |kept| kept.holding.lose("was lost: its renewal was refused", refusal: error) }
    end

    # A release is about to be sent: it is our own doing that renewals fail from here on.
    def releasing(lease_key)
      synchronize { @ttls.delete(lease_key) }
      each_kept(lease_key) { |kept| kept.holding.ended = true }
    end

    def released(lease_key)
      each_kept(lease_key) { |kept| kept.holding.released = true }
    end

    # Another with_lock that shares the token released the lease.
    def released_by_another(lease_key)
      each_kept(lease_key) { |kept| kept.holding.lose("was released by another with_lock that shares its token") }
    end

    private

    def synchronize(&step)
      Shield.up { @mutex.synchronize(&step) }
    end

    def each_kept(lease_key)
      synchronize do
        (@kept[lease_key] || []).each do |kept|
          yield kept
          settle(kept)
        end
      end
    end

    def forget(kept)
      @ttls.delete(kept.lease_key)
      remaining = @kept.fetch(kept.lease_key, []) - [kept]
      remaining.empty? ? @kept.delete(kept.lease_key) : @kept[kept.lease_key] = remaining
    end

    def held?(kept)
      kept.holding.look(@clock.now)
      kept.holding.live?
    end

    def jitter
      Random.rand(-1.0..1.0)
    end

    # --- what follows from a holding's state -------------------------------------------------------

    # Sets the timers of a lock as its state wants them, and tells of its loss or end. After every change.
    def settle(kept)
      return settle_ended(kept) unless held?(kept)

      kept.stop_timer = reset(kept.stop_timer, kept.holding.trust.stop_at) { safely { settle(kept) } }
      due_at = kept.renewing ? Float::INFINITY : kept.holding.schedule.due_at
      if due_at <= @clock.now
        kept.renewing = true
        @due << kept
        wake_worker
      end
      kept.due_timer = reset(kept.due_timer, !kept.renewing && due_at.finite? ? due_at : nil) { safely { settle(kept) } }
    end

    def settle_ended(kept)
      kept.stop_timer = reset(kept.stop_timer, nil)
      kept.due_timer = reset(kept.due_timer, nil)
      kept.renewing = false if @due.delete(kept)
      if kept.holding.loss && !kept.announced
        kept.announced = true
        kept.calls.each { |call| enqueue_call(kept, call) }
      end
      kept.changed.broadcast
    end

    # What a timer does. Nothing may end the timers' thread.
    def safely(&step)
      synchronize(&step)
    rescue StandardError => error
      @log.call("locks could not be looked after: #{error.class}: #{error.message}")
    end

    def reset(timer, moment, &action)
      return timer if timer&.at == moment

      timer&.cancel
      moment && @clock.at(moment, &action)
    end

    # --- the workers -------------------------------------------------------------------------------

    def enqueue_call(kept, call)
      @calls << -> { call.call(kept.holding.loss.again) }
      wake_worker
    end

    # After something was queued.
    def wake_worker
      @work.signal
      return if @due.size + @calls.size <= @idle

      @workers.select!(&:alive?)
      @workers.size < WORKERS ? start_worker : make_room
    rescue ThreadError => error
      # The others go on; were there none, the loss would be noticed at the stop time.
      @log.call("a thread could not be started: #{error.message}")
    end

    # A server that hangs must not let locks with much time left use up that of the others.
    def make_room
      @room_timer = reset(@room_timer, nil)
      urgent = @due.min_by { |kept| kept.holding.trust.stop_at }
      slack = @under_way.max_by { |kept| kept.holding.trust.stop_at }
      now = @clock.now
      return unless urgent && slack && slack.holding.trust.stop_at - now > 2 * (urgent.holding.trust.stop_at - now)

      had_its_time = slack.exchange.began_at + ROOM_SECONDS
      slack.exchange.abort if had_its_time <= now
      @room_timer = @clock.at([had_its_time, now + 0.1].max) { safely { make_room } }
    end

    def start_worker
      @workers << Shield.thread("volcano renewals") { work }
    end

    def work
      while (job = next_job)
        begin
          job.call
        rescue StandardError => error
          @log.call("#{error.class} in a thread of the SDK: #{error.message}")
        end
      end
    end

    # What to do next, as soon as there is something; nil after a while without anything.
    def next_job
      @mutex.synchronize do
        leave_at = @clock.now + LINGER_SECONDS
        until (job = renewal_job || call_job)
          if @closed || @clock.now >= leave_at
            @workers.delete(Thread.current)
            return
          end
          idle
        end
        job
      end
    end

    def idle
      @idle += 1
      @work.wait(@mutex, LINGER_SECONDS)
    ensure
      @idle -= 1
    end

    def renewal_job
      kept = @due.min_by { |one| one.holding.trust.stop_at }
      return unless kept

      @due.delete(kept)
      -> { renew(kept) }
    end

    def call_job
      return if @calls.empty? || @calling >= CALLING_WORKERS

      @calling += 1
      call = @calls.shift
      -> { call_user(call) }
    end

    def call_user(call)
      call.call
    rescue StandardError => error
      @log.call("an on_lost block raised #{error.class}: #{error.message}")
    ensure
      synchronize do
        @calling -= 1
        wake_worker unless @calls.empty?
      end
    end

    def renew(kept)
      request, attempt = synchronize { next_try(kept) }
      outcome = attempt && @transport.call(attempt) { |exchange| under_way(kept, exchange) }
    ensure
      synchronize { tried(kept, request, outcome) }
    end

    # The renewal that is due: [Request, Try], or nil when the lock is no longer held.
    def next_try(kept)
      return unless held?(kept)

      holding = kept.holding
      request = kept.request ||= @request.call(holding.lease, holding.ttl)
      attempt = holding.renewal(request, @clock.now, @timeout)
      (@kept.fetch(kept.lease_key, []) - [kept]).each do |other|
        other.holding.sent(@clock.now, holding.ttl)
        settle(other)
      end
      settle(kept)
      [request, attempt]
    end

    def under_way(kept, exchange)
      synchronize do
        kept.exchange = exchange
        @under_way << kept
      end
    end

    def tried(kept, request, outcome)
      kept.renewing = false
      @under_way.delete(kept)
      if request
        outcome ||= Operations::Failure.new(sent_at: @clock.now, error: Error::TransportError.new("renew was interrupted"), reached: true)
        kept.holding.renewed(request, outcome, now: @clock.now, jitter: jitter)
        kept.request = nil if kept.holding.schedule.failures.zero?
        kept.changed.broadcast
      end
      settle(kept)
    end
  end
end

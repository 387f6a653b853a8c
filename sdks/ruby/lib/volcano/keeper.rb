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
  #   due timer ──> due ──> worker takes the most urgent, and what else is due or nearly so ──> one request
  #                  ^                    │ alone: the single route           many: renew many │
  #                  └── each by itself, where the request as a whole was refused ─────────────┘
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
      # request: of the due renewal when sent by itself, from its first such try to its success; alone: it must be
      # sent by itself this time.
      attr_accessor :stop_timer, :due_timer, :request, :alone, :renewing, :announced

      def initialize(holding, now, mine)
        @holding = holding
        @first_lease = holding.lease
        @was_late = holding.schedule.due_at <= now # the grant took so long that a renewal was due at once
        @mine = mine
        @changed = ConditionVariable.new # after each renewal, at the loss, at the end
        @calls = [] # the on_lost blocks
        @renewing = false # queued for a worker, or with one
        @alone = false
        @announced = false
      end

      # What every request of this lease is known by.
      def lease_key
        @lease_key ||= [@first_lease.key, @first_lease.token].freeze
      end

      # Until when it can be renewed, by what is known now.
      def stop_at
        @holding.trust.stop_at
      end

      # Does it belong to this process? (Not in the child of a fork.)
      def mine?
        @mine.call
      end
    end

    # Renewals that travel in one request: their locks, its Try, and the exchange while it is under way.
    Batch = Struct.new(:locks, :attempt, :exchange) do
      include Discreet

      def many?
        locks.size > 1
      end

      # It is as urgent as the most urgent of them.
      def stop_at
        locks.map(&:stop_at).min
      end
    end

    # @param sender [Proc] -> the credential and a new request id
    # @param log [Proc] told a sentence about what nobody else would hear of
    def initialize(clock:, transport:, timeout:, mine:, sender:, log:)
      @clock = clock
      @transport = transport
      @timeout = timeout
      @mine = mine
      @sender = sender
      @log = log
      @mutex = Mutex.new
      @kept = {} # {["nightly", "1b9d…"] => [Kept, …]} running with_locks
      @ttls = {} # {["nightly", "1b9d…"] => 30} the shortest that was sent
      @due = [] # [Kept, …] whose renewal should be sent
      @calls = [] # [Proc, …] on_lost blocks to be called
      @work = ConditionVariable.new
      @workers = [] # [Thread, …]
      @under_way = [] # [Batch, …] that workers have sent
      @together = true # until the server is seen to lack it
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
        holding.lose("was lost: its client was closed") if @closed
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

    # Makes `how` the loss of all locks, and a close that of those to come: a grant may be on its way. Returns those
    # that are to be released.
    def lose_all(how)
      synchronize do
        @closed = true
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
      return start_worker if @workers.size < WORKERS

      make_room unless @room_timer
    rescue ThreadError => error
      # The others go on; were there none, the loss would be noticed at the stop time.
      @log.call("a thread could not be started: #{error.message}")
    end

    # A server that hangs must not let locks with much time left use up that of the others. Looks again soon, as long
    # as something waits for a worker.
    def make_room
      @room_timer = reset(@room_timer, nil)
      urgent = @due.min_by(&:stop_at)
      slack = @under_way.max_by(&:stop_at)
      return unless urgent && slack

      now = @clock.now
      had_its_time = slack.exchange.began_at + ROOM_SECONDS
      slack.exchange.abort if had_its_time <= now && slack.stop_at - now > 2 * (urgent.stop_at - now)
      @room_timer = @clock.at(now + 0.1) { safely { make_room } }
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
      urgent = @due.min_by(&:stop_at)
      return unless urgent

      locks = [urgent, *companions(urgent)]
      locks.each { |kept| kept.renewing = true }
      @due -= locks
      -> { renew(locks) }
    end

    # Whose renewals go along with that one's: those that are due, or nearly so, the urgent ones first.
    def companions(urgent)
      return [] if urgent.alone || !@together

      now = @clock.now
      nearly_due = @kept.values.flatten.select { |kept| !kept.renewing && kept.holding.may_join?(now) }
      [*@due.reject { |kept| kept.alone || kept.equal?(urgent) }, *nearly_due].min_by(Operations::MANY - 1, &:stop_at)
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

    def renew(locks)
      batch = synchronize { next_batch(locks) }
      outcome = batch && @transport.call(batch.attempt) { |exchange| under_way(batch, exchange) }
    ensure
      synchronize { tried(locks, batch, outcome) }
    end

    # What is to be sent for those that are still held; nil when there is none.
    def next_batch(locks)
      held = locks.select { |kept| held?(kept) }
      return if held.empty?

      request = held.size == 1 ? renewal_of(held.first) : Operations.renew_many(held.map { |kept| [kept.holding.lease, kept.holding.ttl] }, **@sender.call)
      Batch.new(held, held.map { |kept| next_try(kept, request) }.min_by(&:timeout))
    end

    def renewal_of(kept)
      lease = kept.holding.lease
      kept.request ||= Operations.renew(lease.key, ttl: kept.holding.ttl, token: lease.token, **@sender.call)
    end

    # The Try that this lock allows.
    def next_try(kept, request)
      holding = kept.holding
      attempt = holding.renewal(request, @clock.now, @timeout)
      @kept.fetch(kept.lease_key, []).each do |other|
        next if other.equal?(kept)

        other.holding.sent(@clock.now, holding.ttl)
        settle(other)
      end
      settle(kept)
      attempt
    end

    def under_way(batch, exchange)
      synchronize do
        batch.exchange = exchange
        @under_way << batch
      end
    end

    def tried(locks, batch, outcome)
      @under_way.delete_if { |one| one.equal?(batch) }
      outcomes = batch && outcomes_of(batch, outcome)
      return send_apart(locks) if batch && outcomes.nil?

      locks.each { |kept| kept.renewing = kept.alone = false }
      batch&.locks&.zip(outcomes) { |kept, own| renewed(kept, batch.attempt.request, own) }
      locks.each { |kept| settle(kept) }
    end

    # What became of each renewal in it; nil when they must be sent apart.
    def outcomes_of(batch, outcome)
      request = batch.attempt.request
      outcome ||= Operations::Failure.new(sent_at: @clock.now, error: Error::TransportError.new("renew was interrupted"), reached: true)
      return [outcome] unless batch.many?

      @together = false if Operations.lacking?(outcome)
      Operations.renewed_each(request, batch.locks.map { |kept| kept.holding.lease.key }, outcome)
    end

    def renewed(kept, request, outcome)
      kept.holding.renewed(request, outcome, now: @clock.now, jitter: jitter)
      kept.request = nil if kept.holding.schedule.failures.zero?
      kept.changed.broadcast
    end

    # Each by itself, at once, and for this time only.
    def send_apart(locks)
      locks.each { |kept| kept.alone = true }
      @due.concat(locks)
      locks.each { |kept| settle(kept) }
      [locks.size, WORKERS].min.times { wake_worker }
    end
  end
end

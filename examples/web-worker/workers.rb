# frozen_string_literal: true

# A job runner with forked workers, as Puma, Resque and Sidekiq Enterprise are: ruby workers.rb WORKERS JOBS_FOLDER STORE
#
# Queues deliver at least once: the same invoice may be in two jobs, and two workers may have one each. The lock keeps
# them apart; the mark in the data tells the second that the work is done. Ends when no job is left, or on SIGTERM after the
# present jobs.

require "pstore"
require "volcano"

# The client may be made before the fork: each child makes connections and threads of its own.
VOLCANO = Volcano::Client.new

# One forked process.
class Worker
  def initialize(jobs, store)
    @jobs = jobs
    @store = PStore.new(store)
    @stopping = false
  end

  def run
    trap("TERM") { @stopping = true } # no more than a flag: a trap handler may take no lock
    until @stopping || (waiting = Dir[File.join(@jobs, "*.job")]).empty?
      job = claim(waiting.min) and work_off(job)
    end
    VOLCANO.close
  end

  private

  # Takes a job off the queue; nil when another worker was quicker.
  def claim(job)
    mine = "#{job}.#{Process.pid}"
    File.rename(job, mine)
    mine
  rescue Errno::ENOENT
    nil
  end

  def work_off(job)
    invoice = File.read(job).strip
    VOLCANO.locks.with_lock("invoice:#{invoice}", ttl: 30) { |guard| send_invoice(invoice, guard) }
    File.delete(job)
  rescue Volcano::Error::ConflictError
    File.rename(job, "#{job.delete_suffix(".#{Process.pid}")}") # the same invoice is being worked on: later
    sleep 0.1
  end

  def send_invoice(invoice, guard)
    return puts("invoice #{invoice} was sent before") if sent?(invoice)

    sleep 0.2 # stands for rendering a PDF
    guard.check! # before what cannot be undone
    mark(invoice, guard.lease.fencing_token)
    puts "invoice #{invoice} is sent"
  end

  def sent?(invoice)
    @store.transaction(true) { @store.root?(invoice) }
  end

  def mark(invoice, fencing_token)
    @store.transaction do
      raise "invoice #{invoice}: a later holder has written" if (@store[invoice] || 0) > fencing_token

      @store[invoice] = fencing_token
    end
  end
end

workers, jobs, store = ARGV
$stdout.sync = true
pids = Array.new(Integer(workers)) do
  fork { Worker.new(jobs, store).run }
end
trap("TERM") { Process.kill("TERM", *pids) }
statuses = pids.map { |pid| Process.wait2(pid).last }
exit statuses.all?(&:success?)

# frozen_string_literal: true

# Adds up a day's sales, once, on whichever host comes first: ruby rollup.rb DAY SALES_FOLDER STORE
#
# Exit status 0: it is done, or somebody else is doing it. 75: it was not finished; the next run tries again.

require "pstore"
require "volcano"

# The totals: {"2026-11-28" => 4200, :fencing_token => 17…}. Your database goes here.
class Totals
  class StaleWrite < StandardError; end

  def initialize(path)
    @store = PStore.new(path)
  end

  def include?(day)
    @store.transaction(true) { @store.root?(day) }
  end

  # The guarded write: compares and writes in one transaction, so that a host that was asleep cannot undo a later one's work.
  def write(day, total, fencing_token:)
    @store.transaction do
      raise StaleWrite, "a later run has written" if (@store[:fencing_token] || 0) > fencing_token

      @store[day] = total
      @store[:fencing_token] = fencing_token
    end
  end
end

def roll_up(day, sales, guard)
  Dir[File.join(sales, day, "*.csv")].sum do |file|
    guard.check! # stops early when the lock is lost
    sleep 0.3 # stands for a file that takes long
    File.readlines(file, chomp: true).sum { |line| line.split(",").last.to_i }
  end
end

day, sales, store = ARGV
totals = Totals.new(store)
begin
  Volcano::Client.new do |volcano|
    volcano.locks.with_lock("nightly-rollup", ttl: 30) do |guard|
      # cron starts all hosts at once, but a slow one may come when the first has finished: the lock is free, the work is done.
      next puts("#{day} was rolled up before") if totals.include?(day)

      totals.write(day, roll_up(day, sales, guard), fencing_token: guard.lease.fencing_token)
      puts "#{day} is rolled up"
    end
  end
rescue Volcano::Error::ConflictError
  puts "another host is at it"
rescue Totals::StaleWrite, Volcano::Error::LockLostError, Volcano::Error::TransportError => error
  warn "rollup: #{error.message}"
  exit 75
end

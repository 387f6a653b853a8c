# frozen_string_literal: true

# Brings the schema up to date, step by step: ruby migrate.rb SCHEMA_FILE
#
# Who waits for it needs no word of ours: the lock is given back when the block ends, and is over when we die.
# Exit status 0: it is up to date, or somebody else is at it. 75: it was not finished; start it again.

require "json"
require "volcano"

STEPS = 3

# {"version": 2, "fencing_token": 17…} in a file that every language can read. Your database goes here.
class Schema
  class StaleWrite < StandardError; end

  def initialize(path)
    @path = path
  end

  def version
    File.exist?(@path) ? JSON.parse(File.read(@path)).fetch("version") : 0
  end

  # The guarded write: compares and writes under one lock of the file, so that a migration that was asleep cannot undo a later one's.
  def write(version, fencing_token:)
    File.open("#{@path}.lock", File::CREAT | File::RDWR) do |lock|
      lock.flock(File::LOCK_EX)
      raise StaleWrite, "a later migration has been here" if latest_token > fencing_token

      File.write("#{@path}.new", JSON.generate(version: version, fencing_token: fencing_token))
      File.rename("#{@path}.new", @path) # whoever reads sees the old file or the new one
    end
  end

  private

  def latest_token
    File.exist?(@path) ? JSON.parse(File.read(@path)).fetch("fencing_token") : 0
  end
end

schema = Schema.new(ARGV.first)
$stdout.sync = true
begin
  Volcano::Client.new do |volcano|
    # An application may have the lock for a moment, to look: that is no reason to give up.
    volcano.locks.with_lock("migration:shop", ttl: 10, wait: 5) do |guard|
      while (step = schema.version + 1) <= STEPS
        guard.wait_lost(timeout: Float(ENV.fetch("STEP_SECONDS", "0.5"))) # stands for a change that takes long
        guard.check!
        schema.write(step, fencing_token: guard.lease.fencing_token)
        puts "migration: step #{step} of #{STEPS}"
      end
    end
  end
rescue Volcano::Error::ConflictError
  puts "another migration is under way"
rescue Schema::StaleWrite, Volcano::Error::LockLostError, Volcano::Error::TransportError => error
  warn "migration: #{error.message}"
  exit 75
end

# frozen_string_literal: true

module Volcano
  # One acquisition of a key. Frozen: a renewal returns a new one.
  class LockLease
    # @return [String] the lock's name
    attr_reader :key
    # @return [String] the lock token, a UUID and a secret: whoever knows it holds the lease
    attr_reader :token
    # @return [Time] when the lease lapses by the server's clock, in UTC. For people; trust a guard instead
    attr_reader :expires_at
    # @return [Integer] rises with each new holder and stays the same through renewals
    attr_reader :fencing_token

    def initialize(key:, token:, expires_at:, fencing_token:)
      @key = key
      @token = token
      @expires_at = expires_at
      @fencing_token = fencing_token
      freeze
    end

    def ==(other)
      other.is_a?(LockLease) && to_h == other.to_h
    end
    alias eql? ==

    def hash
      to_h.hash
    end

    # @return [Hash] with the token
    def to_h
      { key: @key, token: @token, expires_at: @expires_at, fencing_token: @fencing_token }
    end

    # For pattern matching: `in { key:, fencing_token: }`.
    def deconstruct_keys(_names)
      to_h
    end

    # Silent about the token.
    def inspect
      "#<#{self.class} key=#{@key.inspect} fencing_token=#{@fencing_token} expires_at=#{@expires_at.inspect}>"
    end
    alias to_s inspect
  end

  # What a read tells of a key. Frozen.
  class LockState
    # @return [Time, nil] when the lease lapses by the server's clock; nil when the key is free
    attr_reader :expires_at
    # @return [Integer, nil] the holder's; nil when the key is free
    attr_reader :fencing_token

    def initialize(held:, expires_at: nil, fencing_token: nil)
      @held = held
      @expires_at = expires_at
      @fencing_token = fencing_token
      freeze
    end

    # Is the key taken? Also true in the second of grace after a lease lapsed.
    def held?
      @held
    end
    alias held held?

    def ==(other)
      other.is_a?(LockState) && to_h == other.to_h
    end
    alias eql? ==

    def hash
      to_h.hash
    end

    def to_h
      { held: @held, expires_at: @expires_at, fencing_token: @fencing_token }
    end

    def deconstruct_keys(_names)
      to_h
    end

    def inspect
      "#<#{self.class} held=#{@held} fencing_token=#{@fencing_token.inspect} expires_at=#{@expires_at.inspect}>"
    end
    alias to_s inspect
  end
end

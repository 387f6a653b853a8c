# frozen_string_literal: true

require "test_helper"

class TestEvents < VolcanoTest
  E = Volcano::Events

  def test_streams_are_read_as_the_table_says
    table("event_stream").each do |row|
      parser = E::Parser.new
      messages = row["chunks"].flat_map { |chunk| parser.feed(chunk.encode("ISO-8859-1").b) }

      assert_equal(row["events"], messages.map { |message| message.to_h.transform_keys(&:to_s) }, row["title"])
      assert_equal(row["last_id"], parser.last_id, row["title"])
    end
  end

  def test_the_filters_of_waiting_keys_are_those_of_the_table
    table("event_filters").each do |row|
      filters = E::Filters.of(row["keys"])

      assert_equal(row["filters"], { "keys" => filters.keys, "prefixes" => filters.prefixes }, row["title"])
      row["keys"].each { |key| assert(filters.cover?(key), key) }
    end
  end

  def test_what_filters_cover_is_what_the_table_says
    table("event_filters", "covers").each do |row|
      filters = E::Filters.new(row["filters"]["keys"], row["filters"]["prefixes"])

      assert_equal(row["covered"], filters.cover?(row["key"]), row["title"])
    end
  end

  def test_filters_are_a_query
    assert_equal("key=a%3A1&key=b&prefix=x.", E::Filters.new(%w[b a:1], ["x."]).query)
  end

  def test_a_watch_takes_keys_and_prefixes_singly_and_in_lists
    { [nil, "a"] => [[], ["a"]], ["a", nil] => [["a"], []], [%w[b a b], "c"] => [%w[a b], ["c"]], [[], ["c"]] => [[], ["c"]] }.each do |given, wanted|
      filters = E::Filters.checked(*given)

      assert_equal(wanted, [filters.keys, filters.prefixes])
    end
  end

  def test_a_watch_refuses_what_is_no_filter_by_its_name
    { [nil, nil] => /key and prefix must be 1 to 64 together; got 0/, [[], nil] => /got 0/, [("a".."zz").first(65), nil] => /got 65/,
      ["a/b", "c"] => /\Akey must be 1 to 128/, ["a", ["b", 7]] => /\Aprefix must be 1 to 128/, ["a\n", nil] => /\Akey must/, [nil, ""] => /\Aprefix/,
      [false, nil] => /\Akey/, [[["a"]], nil] => /\Akey/, [{ "a" => 1 }, nil] => /\Akey/ }.each do |given, message|
      assert_match(message, assert_raises(ArgumentError, given.inspect) { E::Filters.checked(*given) }.message)
    end
  end

  def test_a_message_is_read_as_an_event
    event = E.read(told("lapsed", { key: "k", fencing_token: 7, at: "2026-12-01T01:00:00.123+01:00", watchers: 2 }))

    assert_equal([:lapsed, "k", 7, Time.utc(2026, 12, 1, 0, 0, 0, 123_000), 2], event.to_h.values)
    assert_predicate(event.at, :utc?)
    assert([event, event.key, event.at].all?(&:frozen?))
  end

  def test_a_reset_says_nothing_else
    assert_equal({ type: :reset, key: nil, fencing_token: nil, at: nil, watchers: nil }, E.read(told("reset", {})).to_h)
  end

  def test_a_message_of_another_kind_is_passed_over
    assert_nil(E.read(told("message", {})))
    assert_nil(E.read(told("renewed", { key: "k" })))
  end

  # Something happened, and nobody knows what: as after a gap.
  def test_a_message_that_cannot_be_understood_is_a_reset
    good = { key: "k", fencing_token: 7, at: "2026-12-01T00:00:00.123Z", watchers: 1 }
    [good.except(:key), { **good, fencing_token: "7" }, { **good, at: "now" }, { **good, watchers: nil }, [], 7, nil, "text"].each do |data|
      assert_equal(E::RESET, E.read(told("released", data)), data.inspect)
    end
    ["", "{", "\u{FFFD}", "[" * 200].each { |data| assert_equal(E::RESET, E.read(E::Message.new(type: "released", data: data, id: ""))) }
  end

  def test_what_has_not_ended_is_counted
    parser = E::Parser.new
    assert_equal(0, parser.kept)

    parser.feed("data: #{"x" * 100}\ndata: #{"y" * 50}")
    assert_equal(156, parser.kept)

    parser.feed("\n\n")
    assert_equal(0, parser.kept)
  end

  def test_events_compare_by_value_and_can_be_matched
    one, other = Array.new(2) { E.read(told("released", { key: "k", fencing_token: 7, at: "2026-12-01T00:00:00Z", watchers: 1 })) }

    assert_equal(one, other)
    assert_equal(1, [one, other].uniq.size)
    refute_equal(one, E::RESET)
    assert_equal("k", (one in { type: :released, key: }) && key)
    assert_match(/\A#<Volcano::LockEvent released key="k" fencing_token=7 at=2026-12-01 00:00:00 UTC watchers=1>\z/, one.inspect)
    assert_equal("#<Volcano::LockEvent reset>", E::RESET.to_s)
  end

  private

  def told(type, data)
    E::Message.new(type: type, data: JSON.generate(data), id: "1")
  end
end

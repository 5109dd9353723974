package coordination

import (
	"math"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestLeaseConfigIsChecked(t *testing.T) {
	for name, c := range map[string]struct {
		duration, renew, stagger time.Duration
		phrase                   string // of the error, if one is expected
	}{
		"usual":               {30 * time.Second, 10 * time.Second, 5 * time.Second, ""},
		"no stagger":          {time.Second, 300 * time.Millisecond, 0, ""},
		"shortest":            {time.Millisecond, time.Microsecond, 0, ""},
		"longest":             {math.MaxInt64, math.MaxInt64 - 1, math.MaxInt64, ""},
		"zero":                {0, 0, 0, "at least 1ms"},
		"negative":            {-time.Second, time.Second, 0, "at least 1ms"},
		"no renewal":          {time.Second, 0, 0, "such as a third"},
		"negative renewal":    {time.Second, -1, 0, "such as a third"},
		"renewed at its end":  {time.Second, time.Second, 0, "less than the lease duration"},
		"renewed too late":    {time.Second, time.Minute, 0, "less than the lease duration"},
		"negative stagger":    {time.Second, time.Millisecond, -1, "such as a sixth"},
		"below a millisecond": {time.Microsecond, time.Nanosecond, 0, "at least 1ms"},
	} {
		t.Run(name, func(t *testing.T) {
			config, err := NewLeaseConfig(c.duration, c.renew, c.stagger)
			if c.phrase != "" {
				require.ErrorIs(t, err, ErrInvalidConfig)
				require.ErrorContains(t, err, c.phrase)
				require.Zero(t, config)
				return
			}
			require.NoError(t, err)
			require.Equal(t, c.duration, config.Duration())
			require.Equal(t, c.renew, config.RenewInterval())
			require.Equal(t, c.stagger, config.ChallengeStagger())
		})
	}
}

func TestLeaseConfigsInTheUsualProportions(t *testing.T) {
	config, err := LeaseConfigFor(30 * time.Second)
	require.NoError(t, err)
	require.Equal(t, DefaultLeaseConfig(), config)
	require.True(t, config.RenewsWithMargin())
	_, err = LeaseConfigFor(0)
	require.ErrorIs(t, err, ErrInvalidConfig)

	half, err := NewLeaseConfig(10*time.Second, 5*time.Second, 0)
	require.NoError(t, err)
	require.False(t, half.RenewsWithMargin(), "the second renewal would come when the lease is over")
	longest, err := NewLeaseConfig(math.MaxInt64, math.MaxInt64-1, 0)
	require.NoError(t, err)
	require.False(t, longest.RenewsWithMargin())
}

func TestChallengeDelaySaturates(t *testing.T) {
	config := DefaultLeaseConfig()
	require.Zero(t, config.ChallengeDelay(0))
	require.Zero(t, config.ChallengeDelay(-1))
	require.Zero(t, config.ChallengeDelay(math.MinInt))
	require.Equal(t, 15*time.Second, config.ChallengeDelay(3))
	require.Equal(t, time.Duration(math.MaxInt64), config.ChallengeDelay(math.MaxInt))
	require.Zero(t, LeaseConfig{}.ChallengeDelay(7))
}

func TestGrantIsExactToTheMillisecond(t *testing.T) {
	config, err := LeaseConfigFor(time.Second)
	require.NoError(t, err)
	now := time.Date(2026, 5, 6, 7, 8, 9, 123_456_789, time.FixedZone("there", 7200))
	lease := config.Grant(MustMemberID("m"), token(1, 2), now)
	require.Equal(t, time.Date(2026, 5, 6, 5, 8, 9, 123_000_000, time.UTC), lease.GrantedAt)
	require.Equal(t, lease.GrantedAt.Add(time.Second), lease.Deadline)
	require.Equal(t, MustMemberID("m"), lease.Member)
	require.Equal(t, token(1, 2), lease.Token)

	for _, now := range []time.Time{lastInstant, lastInstant.Add(-time.Millisecond), firstInstant, time.Unix(1<<61, 0), time.Unix(-1<<61, 0)} {
		lease := config.Grant(MustMemberID("m"), token(1, 2), now)
		_, err := EncodeValue(lease)
		require.NoError(t, err, "a lease at %s can be written", now)
		require.False(t, lease.Deadline.Before(lease.GrantedAt))
	}
}

func TestTimingOfALease(t *testing.T) {
	config := DefaultLeaseConfig()
	start := time.UnixMilli(1_700_000_000_000).UTC()
	timing := config.Timing(config.Grant(MustMemberID("m"), token(1, 2), start))
	require.Equal(t, start.Add(10*time.Second), timing.RenewAt)
	require.Equal(t, start.Add(30*time.Second), timing.Deadline)
	require.True(t, timing.Live(timing.Deadline.Add(-1)))
	require.False(t, timing.Live(timing.Deadline))
	require.Equal(t, 30*time.Second, timing.Remaining(start))
	require.Zero(t, timing.Remaining(timing.Deadline.Add(time.Hour)))
	require.Equal(t, timing.Deadline, timing.ChallengeAt(0))
	require.Equal(t, timing.Deadline, timing.ChallengeAt(-5))
	require.Equal(t, timing.Deadline.Add(10*time.Second), timing.ChallengeAt(2))
}

func TestTurnsAreExactAndSaturate(t *testing.T) {
	start := time.UnixMilli(0).UTC()
	century := 100 * 365 * 24 * time.Hour
	require.Equal(t, start.Add(century).Add(century).Add(century).Add(century), turnOf(start, 4, century),
		"a delay of more than 292 years is no single Duration")
	require.Equal(t, lastInstant, turnOf(start, math.MaxInt, math.MaxInt64))
	require.Equal(t, lastInstant, turnOf(lastInstant, 1, time.Millisecond))
	require.Equal(t, firstInstant.Add(time.Second), turnOf(firstInstant, 1, time.Second))
	require.Equal(t, start, turnOf(start, -3, time.Hour))
	require.Equal(t, start, turnOf(start, 1000, 0))
}

func TestManualClockStandsUntilItIsMoved(t *testing.T) {
	start := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	clock := NewManualClock(start)
	require.Equal(t, start, clock.Now())
	clock.Advance(time.Hour)
	require.Equal(t, start.Add(time.Hour), clock.Now())
	clock.Advance(-2 * time.Hour)
	require.Equal(t, start.Add(-time.Hour), clock.Now())
	clock.Set(start)
	require.Equal(t, start, clock.Now())
	var zero ManualClock
	require.True(t, zero.Now().IsZero())
}

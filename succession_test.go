package coordination

import (
	"bufio"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

type successionVector struct {
	Name    string
	Role    string
	Records []struct {
		Offset       int64
		Role         string
		Kind         string
		Member       string
		RegisteredAt *int64 `json:"registered_at_ms"`
		Lease        *leaseVector
	}
	Roster []struct {
		Member       string
		Offset       int64
		RegisteredAt int64 `json:"registered_at_ms"`
	}
	Lease    *leaseVector
	Me       string
	Now      int64 `json:"now_ms"`
	Duration int64 `json:"duration_ms"`
	Renew    int64 `json:"renew_ms"`
	Stagger  int64 `json:"stagger_ms"`
	Decision struct {
		Action string
		Until  *int64 `json:"until_ms"`
	}
}

type leaseVector struct {
	Member        string
	ProducerID    int64 `json:"producer_id"`
	ProducerEpoch int16 `json:"producer_epoch"`
	GrantedAt     int64 `json:"granted_at_ms"`
	Deadline      int64 `json:"deadline_ms"`
}

func (v *leaseVector) lease() *Lease {
	if v == nil {
		return nil
	}
	return &Lease{
		Member: MustMemberID(v.Member), Token: token(v.ProducerID, v.ProducerEpoch),
		GrantedAt: time.UnixMilli(v.GrantedAt).UTC(), Deadline: time.UnixMilli(v.Deadline).UTC(),
	}
}

func TestSuccessionVectors(t *testing.T) {
	for _, v := range load[successionVector](t, "succession.json") {
		t.Run(v.Name, func(t *testing.T) {
			builder := NewRoleStateBuilder(MustRole(v.Role))
			for _, r := range v.Records {
				key, value := LeaseKey(MustRole(r.Role)), Record(Tombstone{})
				if r.Kind == "registration" {
					key = RegistrationKey(MustRole(r.Role), MustMemberID(r.Member))
				}
				if r.RegisteredAt != nil {
					value = Registration{Member: key.Member, RegisteredAt: time.UnixMilli(*r.RegisteredAt).UTC()}
				}
				if r.Lease != nil {
					value = *r.Lease.lease()
				}
				builder.Apply(r.Offset, key, value)
			}
			want := RoleState{Roster: []RosterEntry{}, Lease: v.Lease.lease()}
			for _, e := range v.Roster {
				want.Roster = append(want.Roster, RosterEntry{MustMemberID(e.Member), e.Offset, time.UnixMilli(e.RegisteredAt).UTC()})
			}
			state := builder.State()
			require.Equal(t, want, state)

			config, err := NewLeaseConfig(time.Duration(v.Duration)*time.Millisecond, time.Duration(v.Renew)*time.Millisecond, time.Duration(v.Stagger)*time.Millisecond)
			require.NoError(t, err)
			decision := Evaluate(state, MustMemberID(v.Me), time.UnixMilli(v.Now).UTC(), config)
			require.Equal(t, v.Decision.Action, decision.Action.String())
			if v.Decision.Until == nil {
				require.True(t, decision.Until.IsZero())
			} else {
				require.Equal(t, *v.Decision.Until, decision.Until.UnixMilli())
			}
		})
	}
}

// TestSuccessionTranscripts runs the files under testdata/succession. A line is a
// command; a command that answers is followed by ---- and its answer, up to an empty
// line. Instants count from an origin; the lease is the default one.
func TestSuccessionTranscripts(t *testing.T) {
	files, err := filepath.Glob("testdata/succession/*.txt")
	require.NoError(t, err)
	require.NotEmpty(t, files)
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".txt"), func(t *testing.T) {
			text, err := os.ReadFile(file)
			require.NoError(t, err)
			require.Equal(t, string(text), replay(t, string(text)))
		})
	}
}

// replay returns a transcript with the answers that the code gives.
func replay(t *testing.T, text string) string {
	var out strings.Builder
	s := &transcript{t: t, role: MustRole("payments"), config: DefaultLeaseConfig()}
	s.builder = NewRoleStateBuilder(s.role)
	lines := bufio.NewScanner(strings.NewReader(text))
	for lines.Scan() {
		line := lines.Text()
		out.WriteString(line + "\n")
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		answer := s.run(strings.Fields(line))
		if answer == "" {
			continue
		}
		out.WriteString("----\n" + answer)
		for lines.Scan() && lines.Text() != "" {
		}
		if lines.Text() == "" && lines.Err() == nil {
			out.WriteString("\n")
		}
	}
	// The last answer of a file has no empty line after it.
	return strings.TrimRight(out.String(), "\n") + "\n"
}

type transcript struct {
	t       *testing.T
	role    Role
	config  LeaseConfig
	builder *RoleStateBuilder
}

func (s *transcript) run(words []string) string {
	offset := func() int64 {
		n, err := strconv.ParseInt(words[1], 10, 64)
		require.NoError(s.t, err)
		return n
	}
	instant := func(text string) time.Time {
		d, err := time.ParseDuration(text)
		require.NoError(s.t, err)
		return time.UnixMilli(0).UTC().Add(d)
	}
	switch words[0] {
	case "register":
		member := MustMemberID(words[2])
		s.builder.Apply(offset(), RegistrationKey(s.role, member), Registration{Member: member, RegisteredAt: instant(words[3])})
	case "withdraw":
		s.builder.Apply(offset(), RegistrationKey(s.role, MustMemberID(words[2])), Tombstone{})
	case "lease":
		token, err := ParseFencingToken(words[3])
		require.NoError(s.t, err)
		s.builder.Apply(offset(), LeaseKey(s.role), s.config.Grant(MustMemberID(words[2]), token, instant(words[4])))
	case "clear":
		s.builder.Apply(offset(), LeaseKey(s.role), Tombstone{})
	case "other-role":
		member := MustMemberID(words[2])
		s.builder.Apply(offset(), RegistrationKey(MustRole("other"), member), Registration{Member: member})
	case "mismatched":
		s.builder.Apply(offset(), RegistrationKey(s.role, MustMemberID(words[2])), Lease{})
		s.builder.Apply(offset(), LeaseKey(s.role), Registration{})
		s.builder.Apply(offset(), Key{Kind: RecordKind(9), Role: s.role}, Tombstone{})
	case "state":
		return s.state()
	case "evaluate":
		decision := Evaluate(s.builder.State(), MustMemberID(words[1]), instant(words[2]), s.config)
		if decision.Action == ActionWait {
			return fmt.Sprintf("wait %s\n", decision.Until.Sub(time.UnixMilli(0)))
		}
		return decision.Action.String() + "\n"
	default:
		require.FailNow(s.t, "unknown command", words[0])
	}
	return ""
}

func (s *transcript) state() string {
	var out strings.Builder
	state := s.builder.State()
	out.WriteString("roster")
	for _, e := range state.Roster {
		fmt.Fprintf(&out, " %s@%d", e.Member, e.Offset)
	}
	if state.Lease == nil {
		out.WriteString("\nlease none\n")
	} else {
		fmt.Fprintf(&out, "\nlease %s %s until %s\n", state.Lease.Member, state.Lease.Token, state.Lease.Deadline.Sub(time.UnixMilli(0)))
	}
	return out.String()
}

func TestFoldDoesNotDependOnTheOrderOfArrival(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		role := MustRole("r")
		type record struct {
			offset int64
			key    Key
			value  Record
		}
		var records []record
		for offset := range int64(rapid.IntRange(0, 30).Draw(t, "records")) {
			member := MustMemberID(rapid.SampledFrom([]string{"a", "b", "c", "d"}).Draw(t, "member"))
			r := record{offset, RegistrationKey(role, member), Tombstone{}}
			switch rapid.IntRange(0, 3).Draw(t, "what") {
			case 0, 1:
				r.value = Registration{Member: member, RegisteredAt: time.UnixMilli(offset).UTC()}
			case 2:
				r.key, r.value = LeaseKey(role), DefaultLeaseConfig().Grant(member, token(1, int16(offset)), time.UnixMilli(offset))
			}
			records = append(records, r)
		}
		inOrder, shuffled := NewRoleStateBuilder(role), NewRoleStateBuilder(role)
		for _, r := range records {
			inOrder.Apply(r.offset, r.key, r.value)
		}
		for _, r := range rapid.Permutation(records).Draw(t, "order") {
			shuffled.Apply(r.offset, r.key, r.value)
			shuffled.Apply(r.offset, r.key, r.value) // twice is once
		}
		require.Equal(t, inOrder.State(), shuffled.State())
		require.Equal(t, len(inOrder.State().Roster), inOrder.size())
		require.Equal(t, inOrder.size(), shuffled.size())
		before := inOrder.State()
		inOrder.compact()
		require.Equal(t, before, inOrder.State())
	})
}

func TestStateSharesNothingWithItsBuilder(t *testing.T) {
	role, member := MustRole("r"), MustMemberID("m")
	builder := NewRoleStateBuilder(role)
	builder.Apply(0, RegistrationKey(role, member), Registration{Member: member})
	builder.Apply(1, LeaseKey(role), Lease{Member: member, Token: token(1, 1)})
	state := builder.State()
	state.Roster[0].Offset = 99
	state.Lease.Member = MustMemberID("x")
	again := builder.State()
	require.EqualValues(t, 0, again.Roster[0].Offset)
	require.Equal(t, member, again.Lease.Member)

	var zero RoleStateBuilder
	zero.Apply(0, RegistrationKey(Role{}, member), Registration{Member: member})
	require.Empty(t, zero.State().Roster, "the zero builder has no role, and folds nothing")
}

func TestPlacesInARoster(t *testing.T) {
	a, b, c := MustMemberID("a"), MustMemberID("b"), MustMemberID("c")
	state := RoleState{Roster: []RosterEntry{{Member: a, Offset: 1}, {Member: b, Offset: 2}, {Member: c, Offset: 3}}}
	_, held := state.Holder()
	require.False(t, held)
	rank, ok := state.RankOf(c)
	require.True(t, ok)
	require.Equal(t, 2, rank)

	state.Lease = &Lease{Member: b}
	holder, held := state.Holder()
	require.True(t, held)
	require.Equal(t, b, holder)
	for member, want := range map[MemberID]int{a: 0, b: 0, c: 1} {
		rank, ok := state.RankOf(member)
		require.True(t, ok)
		require.Equal(t, want, rank, member)
	}
	_, ok = state.RankOf(MustMemberID("x"))
	require.False(t, ok)
	entry, ok := state.Entry(c)
	require.True(t, ok)
	require.EqualValues(t, 3, entry.Offset)
}

func BenchmarkEvaluate(b *testing.B) {
	role := MustRole("r")
	builder := NewRoleStateBuilder(role)
	for i := range 16 {
		member := MustMemberID(strconv.Itoa(i))
		builder.Apply(int64(i), RegistrationKey(role, member), Registration{Member: member})
	}
	builder.Apply(16, LeaseKey(role), DefaultLeaseConfig().Grant(MustMemberID("0"), token(1, 1), time.UnixMilli(0)))
	state, me, now := builder.State(), MustMemberID("15"), time.UnixMilli(60_000)
	b.ReportAllocs()
	for b.Loop() {
		if Evaluate(state, me, now, DefaultLeaseConfig()).Action != ActionWait {
			b.Fatal("rank 14 does not wait")
		}
	}
}

package coordination

import (
	"encoding/hex"
	"encoding/json"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// load reads the vectors of a file under testdata.
func load[T any](t testing.TB, name string) []T {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("testdata", name))
	require.NoError(t, err)
	var vectors []T
	require.NoError(t, json.Unmarshal(text, &vectors))
	require.NotEmpty(t, vectors)
	return vectors
}

func unhex(t testing.TB, text string) []byte {
	t.Helper()
	b, err := hex.DecodeString(text)
	require.NoError(t, err)
	return b
}

type codecVector struct {
	Name          string `json:"name"`
	Kind          string `json:"kind"`
	Role          string `json:"role"`
	Member        string `json:"member"`
	RegisteredAt  int64  `json:"registered_at_ms"`
	ProducerID    int64  `json:"producer_id"`
	ProducerEpoch int16  `json:"producer_epoch"`
	GrantedAt     int64  `json:"granted_at_ms"`
	Deadline      int64  `json:"deadline_ms"`
	Key           string `json:"key"`
	Value         string `json:"value"`
}

func (v codecVector) decoded(t testing.TB) (Key, Record) {
	t.Helper()
	role, err := NewRole(v.Role)
	require.NoError(t, err)
	member, err := NewMemberID(v.Member)
	require.NoError(t, err)
	if v.Kind == "registration" {
		return RegistrationKey(role, member), Registration{Member: member, RegisteredAt: time.UnixMilli(v.RegisteredAt).UTC()}
	}
	require.Equal(t, "lease", v.Kind)
	token, err := NewFencingToken(v.ProducerID, v.ProducerEpoch)
	require.NoError(t, err)
	return LeaseKey(role), Lease{
		Member:    member,
		Token:     token,
		GrantedAt: time.UnixMilli(v.GrantedAt).UTC(),
		Deadline:  time.UnixMilli(v.Deadline).UTC(),
	}
}

func TestCodecVectors(t *testing.T) {
	for _, v := range load[codecVector](t, "codec.json") {
		t.Run(v.Name, func(t *testing.T) {
			key, value := v.decoded(t)
			encodedKey, err := EncodeKey(key)
			require.NoError(t, err)
			require.Equal(t, v.Key, hex.EncodeToString(encodedKey))
			encodedValue, err := EncodeValue(value)
			require.NoError(t, err)
			require.Equal(t, v.Value, hex.EncodeToString(encodedValue))

			decodedKey, err := DecodeKey(unhex(t, v.Key))
			require.NoError(t, err)
			require.Equal(t, key, decodedKey)
			decodedValue, err := DecodeValue(key.Kind, unhex(t, v.Value))
			require.NoError(t, err)
			require.Equal(t, value, decodedValue)
		})
	}
}

func TestRejectVectors(t *testing.T) {
	type vector struct{ Part, Why, Hex string }
	for _, v := range load[vector](t, "rejects.json") {
		t.Run(v.Part+" "+v.Why, func(t *testing.T) {
			var err error
			b := append([]byte{}, unhex(t, v.Hex)...) // never nil, which is a tombstone
			switch v.Part {
			case "key":
				_, err = DecodeKey(b)
			case "registration":
				_, err = DecodeValue(KindRegistration, b)
			case "lease":
				_, err = DecodeValue(KindLease, b)
			}
			var record *RecordError
			require.ErrorAs(t, err, &record)
			require.Equal(t, v.Part, record.Part)
			require.NotEmpty(t, record.Reason)
		})
	}
}

func TestPartitionVectors(t *testing.T) {
	type vector struct {
		Role       string
		Partitions int32
		Partition  int32
	}
	for _, v := range load[vector](t, "partitions.json") {
		got, err := RolePartition(MustRole(v.Role), v.Partitions)
		require.NoError(t, err)
		require.Equal(t, v.Partition, got, "%q of %d", v.Role, v.Partitions)
	}
	_, err := RolePartition(MustRole("r"), 0)
	require.ErrorIs(t, err, ErrInvalidConfig)
	_, err = RolePartition(Role{}, 16)
	require.ErrorIs(t, err, ErrInvalidConfig)
}

func TestNamesAreOneTo249BytesOfUTF8(t *testing.T) {
	for name, c := range map[string]struct {
		text   string
		phrase string // of the error, if one is expected
	}{
		"shortest":       {"x", ""},
		"longest":        {strings.Repeat("x", 249), ""},
		"longest, bytes": {strings.Repeat("é", 124) + "x", ""},
		"empty":          {"", "use 1 to 249 bytes"},
		"too long":       {strings.Repeat("x", 250), "use at most 249"},
		"too many bytes": {strings.Repeat("é", 125), "use at most 249"},
		"not UTF-8":      {"\xc3\x28", "not UTF-8"},
		"surrogate":      {"\xed\xa0\x80", "not UTF-8"},
	} {
		t.Run(name, func(t *testing.T) {
			role, roleErr := NewRole(c.text)
			member, memberErr := NewMemberID(c.text)
			if c.phrase == "" {
				require.NoError(t, roleErr)
				require.NoError(t, memberErr)
				require.Equal(t, c.text, role.String())
				require.Equal(t, c.text, member.String())
				return
			}
			for _, err := range []error{roleErr, memberErr} {
				require.ErrorIs(t, err, ErrInvalidConfig)
				require.ErrorContains(t, err, c.phrase)
			}
			require.Panics(t, func() { MustRole(c.text) })
			require.Panics(t, func() { MustMemberID(c.text) })
		})
	}
}

func TestNamesInJSON(t *testing.T) {
	encoded, err := json.Marshal(struct {
		Role   Role
		Member MemberID
		Nobody MemberID
		Phase  Phase
	}{MustRole("r"), MustMemberID("m"), MemberID{}, PhaseLeading})
	require.NoError(t, err)
	require.JSONEq(t, `{"Role":"r","Member":"m","Nobody":"","Phase":"leading"}`, string(encoded))
}

func TestUniqueMemberIDsDiffer(t *testing.T) {
	a, err := NewUniqueMemberID("node")
	require.NoError(t, err)
	b, err := NewUniqueMemberID("node")
	require.NoError(t, err)
	require.NotEqual(t, a, b)
	require.True(t, strings.HasPrefix(a.String(), "node-"))
	_, err = NewUniqueMemberID(strings.Repeat("x", 240))
	require.ErrorIs(t, err, ErrInvalidConfig)
}

func TestTokensInText(t *testing.T) {
	token, err := ParseFencingToken("4242:7")
	require.NoError(t, err)
	require.EqualValues(t, 4242, token.ProducerID())
	require.EqualValues(t, 7, token.ProducerEpoch())
	require.Equal(t, "4242:7", token.String())

	for _, text := range []string{
		"", "none", ":", "1", "1:", ":1", "1:2:3", "+1:2", "1:+2", "-1:0", "0:-1", "01:2", "1:02", " 1:2", "1:2 ",
		"1:32768", "9223372036854775808:0", "0x1:2", "1_0:2", "１:2",
	} {
		_, err := ParseFencingToken(text)
		require.ErrorIs(t, err, ErrInvalidConfig, "%q", text)
	}

	type carrier struct{ Token FencingToken }
	largest, err := NewFencingToken(math.MaxInt64, math.MaxInt16)
	require.NoError(t, err)
	for _, token := range []FencingToken{{}, token, largest} {
		encoded, err := json.Marshal(carrier{token})
		require.NoError(t, err)
		decoded := carrier{largest}
		require.NoError(t, json.Unmarshal(encoded, &decoded))
		require.Equal(t, token, decoded.Token)
	}
	unchanged := token
	require.Error(t, unchanged.UnmarshalText([]byte("x")))
	require.Equal(t, token, unchanged)
}

func TestZeroTokenIsNone(t *testing.T) {
	var none FencingToken
	zero, err := NewFencingToken(0, 0)
	require.NoError(t, err)
	require.True(t, none.IsZero())
	require.False(t, zero.IsZero(), "0:0 is what a fresh cluster mints first")
	require.NotEqual(t, none, zero)
	require.Equal(t, "none", none.String())
	require.Equal(t, "0:0", zero.String())
	require.Negative(t, none.ProducerID())
	require.Negative(t, none.ProducerEpoch())
	require.False(t, NewLeadershipStatus(MustRole("r"), none, TransactionEmpty).Authoritative(none))
	require.True(t, NewLeadershipStatus(MustRole("r"), zero, TransactionEmpty).Authoritative(zero))
	_, err = NewFencingToken(-1, 0)
	require.ErrorIs(t, err, ErrInvalidConfig)
	_, err = NewFencingToken(0, -1)
	require.ErrorIs(t, err, ErrInvalidConfig)
}

func TestTokensCompareByProducerFirst(t *testing.T) {
	order := []FencingToken{{}, token(0, 0), token(0, 1), token(1, 0), token(1, 9), token(2, 3)}
	for i, a := range order {
		for j, b := range order {
			got := a.Compare(b)
			switch {
			case i < j:
				require.Negative(t, got)
			case i == j:
				require.Zero(t, got)
			default:
				require.Positive(t, got)
			}
		}
	}
}

func token(id int64, epoch int16) FencingToken {
	token, err := NewFencingToken(id, epoch)
	if err != nil {
		panic(err)
	}
	return token
}

func TestEncoderRefuses(t *testing.T) {
	role, member := MustRole("r"), MustMemberID("m")
	dst := []byte("kept")
	for name, key := range map[string]Key{
		"zero role":                  LeaseKey(Role{}),
		"registration of nobody":     RegistrationKey(role, MemberID{}),
		"lease key with a member":    {KindLease, role, member},
		"unknown kind":               {RecordKind(2), role, member},
		"negative kind":              {RecordKind(-1), role, member},
		"a role made by hand, long":  LeaseKey(Role{strings.Repeat("x", 250)}),
		"a role made by hand, UTF-8": LeaseKey(Role{"\xff"}),
	} {
		t.Run(name, func(t *testing.T) {
			got, err := AppendKey(dst, key)
			var record *RecordError
			require.ErrorAs(t, err, &record)
			require.Equal(t, "key", record.Part)
			require.Equal(t, dst, got, "nothing is appended on an error")
		})
	}
	beyond := time.Unix(1<<60, 0)
	for name, value := range map[string]Record{
		"registration of nobody":  Registration{RegisteredAt: time.Now()},
		"lease of nobody":         Lease{Token: token(1, 1)},
		"lease without a token":   Lease{Member: member},
		"instant out of range":    Registration{Member: member, RegisteredAt: beyond},
		"grant out of range":      Lease{Member: member, Token: token(1, 1), GrantedAt: beyond},
		"deadline out of range":   Lease{Member: member, Token: token(1, 1), Deadline: time.Unix(-1<<60, 0)},
		"nil":                     nil,
		"registration by pointer": (*foreign)(nil),
	} {
		t.Run(name, func(t *testing.T) {
			got, err := AppendValue(dst, value)
			var record *RecordError
			require.ErrorAs(t, err, &record)
			require.Equal(t, dst, got)
		})
	}
}

type foreign struct{}

func (*foreign) isRecord() {}

func TestTombstoneIsNilAndNothingElse(t *testing.T) {
	encoded, err := EncodeValue(Tombstone{})
	require.NoError(t, err)
	require.Nil(t, encoded)
	for _, kind := range []RecordKind{KindRegistration, KindLease} {
		value, err := DecodeValue(kind, nil)
		require.NoError(t, err)
		require.Equal(t, Tombstone{}, value)
		_, err = DecodeValue(kind, []byte{})
		require.Error(t, err, "an empty value is not an absent one")
	}
	_, err = DecodeValue(RecordKind(9), nil)
	require.Error(t, err)
}

func TestInstantsAreExactToTheMillisecond(t *testing.T) {
	member := MustMemberID("m")
	for _, ms := range []int64{math.MinInt64, math.MinInt64 + 1, -1, 0, 1, 1_700_000_000_123, math.MaxInt64 - 1, math.MaxInt64} {
		encoded, err := EncodeValue(Registration{Member: member, RegisteredAt: time.UnixMilli(ms)})
		require.NoError(t, err)
		decoded, err := decodeRegistration(encoded)
		require.NoError(t, err)
		require.Equal(t, ms, decoded.RegisteredAt.UnixMilli())
		require.Equal(t, time.UTC, decoded.RegisteredAt.Location())
	}
	fine := time.Date(2026, 1, 2, 3, 4, 5, 678_999_999, time.FixedZone("there", 3600))
	encoded, err := EncodeValue(Registration{Member: member, RegisteredAt: fine})
	require.NoError(t, err)
	decoded, err := decodeRegistration(encoded)
	require.NoError(t, err)
	require.Equal(t, fine.Truncate(time.Millisecond).UTC(), decoded.RegisteredAt)
}

// Generators of records.

func genName(t *rapid.T, label string) string {
	return rapid.StringN(1, -1, 249).Filter(func(s string) bool { return s != "" }).Draw(t, label)
}

func genInstant(t *rapid.T, label string) time.Time {
	return time.UnixMilli(rapid.Int64().Draw(t, label)).UTC()
}

func genToken(t *rapid.T) FencingToken {
	return token(rapid.Int64Min(0).Draw(t, "producer id"), rapid.Int16Min(0).Draw(t, "epoch"))
}

func TestRecordsSurviveARoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		role, member := MustRole(genName(t, "role")), MustMemberID(genName(t, "member"))
		prefix := rapid.SliceOfN(rapid.Byte(), 0, 9).Draw(t, "prefix")
		keys := []Key{RegistrationKey(role, member), LeaseKey(role)}
		values := []Record{
			Registration{Member: member, RegisteredAt: genInstant(t, "registered")},
			Lease{Member: member, Token: genToken(t), GrantedAt: genInstant(t, "granted"), Deadline: genInstant(t, "deadline")},
		}
		for i, key := range keys {
			encoded, err := AppendKey(prefix, key)
			require.NoError(t, err)
			require.Equal(t, prefix, encoded[:len(prefix):len(prefix)])
			decoded, err := DecodeKey(encoded[len(prefix):])
			require.NoError(t, err)
			require.Equal(t, key, decoded)

			encoded, err = AppendValue(prefix, values[i])
			require.NoError(t, err)
			value, err := DecodeValue(key.Kind, encoded[len(prefix):])
			require.NoError(t, err)
			require.Equal(t, values[i], value)
		}
	})
}

func FuzzDecodeKey(f *testing.F) {
	for _, v := range load[codecVector](f, "codec.json") {
		f.Add(unhex(f, v.Key))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		key, err := DecodeKey(b)
		if err != nil {
			var record *RecordError
			require.ErrorAs(t, err, &record)
			require.Equal(t, Key{}, key)
			return
		}
		again, err := EncodeKey(key)
		require.NoError(t, err)
		require.Equal(t, b, again, "a key has one encoding")
	})
}

func FuzzDecodeValue(f *testing.F) {
	for _, v := range load[codecVector](f, "codec.json") {
		f.Add(v.Kind == "lease", unhex(f, v.Value))
	}
	f.Fuzz(func(t *testing.T, lease bool, b []byte) {
		kind := KindRegistration
		if lease {
			kind = KindLease
		}
		if b == nil {
			b = []byte{}
		}
		value, err := DecodeValue(kind, b)
		if err != nil {
			var record *RecordError
			require.ErrorAs(t, err, &record)
			require.Nil(t, value)
			return
		}
		again, err := EncodeValue(value)
		require.NoError(t, err)
		require.Equal(t, b, again, "a value has one encoding")
	})
}

// codecCase is a key and a lease of usual size.
func codecCase() (key Key, lease Record, encodedKey, encodedLease []byte) {
	key = RegistrationKey(MustRole("billing/eu-1"), MustMemberID("node-2"))
	lease = DefaultLeaseConfig().Grant(key.Member, token(4242, 7), time.UnixMilli(1_700_000_000_000))
	encodedKey, _ = EncodeKey(key)
	encodedLease, _ = EncodeValue(lease)
	return key, lease, encodedKey, encodedLease
}

func TestDecodingAllocatesItsStringsAlone(t *testing.T) {
	key, lease, encodedKey, encodedLease := codecCase()
	registration, err := EncodeValue(Registration{Member: key.Member, RegisteredAt: time.Now()})
	require.NoError(t, err)
	buffer := make([]byte, 0, 1024)
	for name, c := range map[string]struct {
		want float64
		run  func()
	}{
		"a key: role and member":             {2, func() { _, _ = DecodeKey(encodedKey) }},
		"a lease: member":                    {1, func() { _, _ = decodeLease(encodedLease) }},
		"a registration: member":             {1, func() { _, _ = decodeRegistration(registration) }},
		"a value: member, and its interface": {2, func() { _, _ = DecodeValue(KindLease, encodedLease) }},
		"appending a key":                    {0, func() { _, _ = AppendKey(buffer, key) }},
		"appending a value":                  {0, func() { _, _ = AppendValue(buffer, lease) }},
	} {
		require.InDelta(t, c.want, testing.AllocsPerRun(200, c.run), 0, name)
	}
}

func BenchmarkDecodeKey(b *testing.B) {
	_, _, encoded, _ := codecCase()
	b.ReportAllocs()
	for b.Loop() {
		if _, err := DecodeKey(encoded); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkDecodeLease(b *testing.B) {
	_, _, _, encoded := codecCase()
	b.ReportAllocs()
	for b.Loop() {
		if _, err := DecodeValue(KindLease, encoded); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkAppendKey(b *testing.B) {
	key, _, _, _ := codecCase()
	buffer := make([]byte, 0, 1024)
	b.ReportAllocs()
	for b.Loop() {
		if _, err := AppendKey(buffer, key); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkAppendLease(b *testing.B) {
	_, lease, _, _ := codecCase()
	buffer := make([]byte, 0, 1024)
	b.ReportAllocs()
	for b.Loop() {
		if _, err := AppendValue(buffer, lease); err != nil {
			b.Fatal(err)
		}
	}
}

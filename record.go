package coordination

import (
	"cmp"
	"crypto/rand"
	"encoding"
	"encoding/binary"
	"fmt"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"
)

// This file is the frozen format of the state topic: names, tokens, keys and
// values. It is shared with the Rust and Java members of a role, byte for byte.

const (
	// StateTopic is the compacted topic that holds registrations and leases.
	StateTopic = "__coordination_state"

	// MaxRoleLen is the length of the longest role, in bytes. Kafka sets no
	// lower limit to a transactional id; this one is that of a topic name.
	MaxRoleLen = 249

	// MaxMemberIDLen is the length of the longest member id, in bytes.
	MaxMemberIDLen = 249

	formatVersion = 0
)

// A Role is what members compete for. It is also the transactional id under which
// its leader writes. Roles are comparable with ==; the zero value is no role and
// is refused everywhere.
type Role struct{ name string }

// NewRole checks that a role is 1 to [MaxRoleLen] bytes of UTF-8. Its error wraps
// [ErrInvalidConfig].
func NewRole(name string) (Role, error) {
	if fault := nameFault(name, MaxRoleLen); fault != "" {
		return Role{}, invalidConfig("role: %s", fault)
	}
	return Role{name}, nil
}

// MustRole is [NewRole] for names that are known to be good. It panics on others.
func MustRole(name string) Role {
	role, err := NewRole(name)
	if err != nil {
		panic(err)
	}
	return role
}

// String returns the role's name.
func (r Role) String() string { return r.name }

// MarshalText returns the role's name, and nothing for the zero value.
func (r Role) MarshalText() ([]byte, error) { return []byte(r.name), nil }

func validRole(role Role) error {
	if role == (Role{}) {
		return invalidConfig("the role is the zero value: make one with NewRole")
	}
	return nil
}

// A MemberID names one member of a role, and must be unique in it. Ids are
// comparable with ==; the zero value names nobody.
type MemberID struct{ name string }

// NewMemberID checks that an id is 1 to [MaxMemberIDLen] bytes of UTF-8. Its error
// wraps [ErrInvalidConfig].
func NewMemberID(name string) (MemberID, error) {
	if fault := nameFault(name, MaxMemberIDLen); fault != "" {
		return MemberID{}, invalidConfig("member id: %s", fault)
	}
	return MemberID{name}, nil
}

// MustMemberID is [NewMemberID] for names that are known to be good. It panics on
// others.
func MustMemberID(name string) MemberID {
	member, err := NewMemberID(name)
	if err != nil {
		panic(err)
	}
	return member
}

// NewUniqueMemberID returns an id that no other process has: the prefix, a dash,
// and 128 random bits in base 32. Use it unless something else guarantees that an
// id is in use once, such as the ordinal of a StatefulSet.
func NewUniqueMemberID(prefix string) (MemberID, error) {
	return NewMemberID(prefix + "-" + strings.ToLower(rand.Text()))
}

// String returns the id's text.
func (m MemberID) String() string { return m.name }

// MarshalText returns the id's text, and nothing for the zero value.
func (m MemberID) MarshalText() ([]byte, error) { return []byte(m.name), nil }

func validMember(member MemberID) error {
	if member == (MemberID{}) {
		return invalidConfig("the member id is the zero value: make one with NewMemberID or NewUniqueMemberID")
	}
	return nil
}

// nameFault says what is wrong with a role or a member id, or nothing.
func nameFault(name string, limit int) string {
	switch {
	case name == "":
		return fmt.Sprintf("empty: use 1 to %d bytes of UTF-8", limit)
	case len(name) > limit:
		return fmt.Sprintf("%d bytes long: use at most %d", len(name), limit)
	case !utf8.ValidString(name):
		return "not UTF-8"
	}
	return ""
}

// A FencingToken is one epoch of a role: the producer id and epoch that Kafka's
// transaction coordinator minted. It guards what the leader writes to Kafka. The
// zero value is no token; 0:0 is a real one, the first of a fresh cluster.
type FencingToken struct {
	id      int64
	epoch   int16
	present bool
}

var (
	_ encoding.TextMarshaler   = FencingToken{}
	_ encoding.TextUnmarshaler = (*FencingToken)(nil)
)

// NewFencingToken makes a token of a producer id and epoch. Neither may be
// negative: Kafka says "none" so.
func NewFencingToken(producerID int64, producerEpoch int16) (FencingToken, error) {
	if producerID < 0 || producerEpoch < 0 {
		return FencingToken{}, invalidConfig("fencing token %d:%d: neither part can be negative", producerID, producerEpoch)
	}
	return FencingToken{producerID, producerEpoch, true}, nil
}

// ParseFencingToken reads what [FencingToken.String] writes: "producerID:epoch" in
// plain decimal, without signs or leading zeros. It does not read "none".
func ParseFencingToken(text string) (FencingToken, error) {
	idText, epochText, found := strings.Cut(text, ":")
	id, idErr := strconv.ParseInt(idText, 10, 64)
	epoch, epochErr := strconv.ParseInt(epochText, 10, 16)
	token := FencingToken{id, int16(epoch), true}
	if !found || idErr != nil || epochErr != nil || id < 0 || epoch < 0 || token.String() != text {
		return FencingToken{}, invalidConfig("fencing token %q: write producer id, colon and epoch, such as 4242:7", text)
	}
	return token, nil
}

// ProducerID returns the first part, -1 for the zero token.
func (t FencingToken) ProducerID() int64 {
	if !t.present {
		return -1
	}
	return t.id
}

// ProducerEpoch returns the second part, -1 for the zero token.
func (t FencingToken) ProducerEpoch() int16 {
	if !t.present {
		return -1
	}
	return t.epoch
}

// IsZero reports whether t is no token.
func (t FencingToken) IsZero() bool { return !t.present }

// Compare orders tokens by producer id, then by epoch, and the zero token before
// all. Within one producer id a greater token is a newer one. Across producer ids
// the order says little: a role whose epochs are used up, or whose transactional
// id expired, goes on under another id.
func (t FencingToken) Compare(other FencingToken) int {
	return cmp.Or(
		cmp.Compare(t.ProducerID(), other.ProducerID()),
		cmp.Compare(t.ProducerEpoch(), other.ProducerEpoch()),
	)
}

// String returns "producerID:epoch", or "none" for the zero token.
func (t FencingToken) String() string {
	if !t.present {
		return "none"
	}
	return string(t.append(make([]byte, 0, 32)))
}

func (t FencingToken) append(dst []byte) []byte {
	dst = strconv.AppendInt(dst, t.id, 10)
	dst = append(dst, ':')
	return strconv.AppendInt(dst, int64(t.epoch), 10)
}

// MarshalText returns the token as String does, and nothing for the zero token.
func (t FencingToken) MarshalText() ([]byte, error) {
	if !t.present {
		return []byte{}, nil
	}
	return t.append(nil), nil
}

// UnmarshalText reads what MarshalText writes.
func (t *FencingToken) UnmarshalText(text []byte) error {
	if len(text) == 0 {
		*t = FencingToken{}
		return nil
	}
	token, err := ParseFencingToken(string(text))
	if err == nil {
		*t = token
	}
	return err
}

// RecordKind tells registrations from leases.
type RecordKind int16

const (
	// KindRegistration: a member stands by for a role.
	KindRegistration RecordKind = 0
	// KindLease: a member leads a role for a while.
	KindLease RecordKind = 1
)

// String returns the kind's name.
func (k RecordKind) String() string {
	switch k {
	case KindRegistration:
		return "registration"
	case KindLease:
		return "lease"
	}
	return "kind " + strconv.Itoa(int(k))
}

// A Key is the key of a record: one for each member of a role, and one for its
// lease. It carries the identity; what a value says of it counts for nothing.
type Key struct {
	Kind   RecordKind
	Role   Role
	Member MemberID // zero for a lease
}

// RegistrationKey returns the key of a member's registration.
func RegistrationKey(role Role, member MemberID) Key { return Key{KindRegistration, role, member} }

// LeaseKey returns the key of a role's lease.
func LeaseKey(role Role) Key { return Key{Kind: KindLease, Role: role} }

// A Record is the value of a record: a [Registration], a [Lease] or a [Tombstone].
type Record interface{ isRecord() }

// A Registration says that a member stands by. Its rank is the offset of its
// record, not its time.
type Registration struct {
	Member MemberID

	// RegisteredAt is the writer's wall clock, kept to the millisecond.
	RegisteredAt time.Time
}

// A Lease says that a member leads under a token until a deadline. Both instants
// are the writer's wall clock, kept to the millisecond.
type Lease struct {
	Member    MemberID
	Token     FencingToken
	GrantedAt time.Time
	Deadline  time.Time
}

// A Tombstone is the absence of a value: the member withdrew, or the role has no
// lease.
type Tombstone struct{}

func (Registration) isRecord() {}
func (Lease) isRecord()        {}
func (Tombstone) isRecord()    {}

// EncodeKey returns the bytes of a key. Its error is a [*RecordError].
func EncodeKey(key Key) ([]byte, error) { return AppendKey(nil, key) }

// AppendKey appends the bytes of a key to dst. On an error it returns dst as it
// was.
func AppendKey(dst []byte, key Key) ([]byte, error) {
	const part = "key"
	if key.Kind != KindRegistration && key.Kind != KindLease {
		return dst, &RecordError{part, "unknown " + key.Kind.String()}
	}
	if fault := nameFault(key.Role.name, MaxRoleLen); fault != "" {
		return dst, &RecordError{part, "role: " + fault}
	}
	if key.Kind == KindLease && key.Member != (MemberID{}) {
		return dst, &RecordError{part, "a lease key names no member"}
	}
	if key.Kind == KindRegistration {
		if fault := nameFault(key.Member.name, MaxMemberIDLen); fault != "" {
			return dst, &RecordError{part, "member: " + fault}
		}
	}
	dst = binary.BigEndian.AppendUint16(dst, formatVersion)
	dst = binary.BigEndian.AppendUint16(dst, uint16(key.Kind))
	dst = appendString(dst, key.Role.name)
	return appendString(dst, key.Member.name), nil
}

// EncodeValue returns the bytes of a value, nil for a [Tombstone]. Its error is a
// [*RecordError].
func EncodeValue(record Record) ([]byte, error) { return AppendValue(nil, record) }

// AppendValue appends the bytes of a value to dst. A [Tombstone] has none: its
// record must carry a nil value, whatever dst holds. On an error AppendValue
// returns dst as it was. What is below a millisecond of an instant is dropped.
func AppendValue(dst []byte, record Record) ([]byte, error) {
	switch record := record.(type) {
	case Registration:
		return appendRegistration(dst, record)
	case Lease:
		return appendLease(dst, record)
	case Tombstone:
		return dst, nil
	}
	return dst, &RecordError{"value", fmt.Sprintf("%T is no record: use a Registration, a Lease or a Tombstone", record)}
}

func appendRegistration(dst []byte, r Registration) ([]byte, error) {
	const part = "registration"
	if fault := nameFault(r.Member.name, MaxMemberIDLen); fault != "" {
		return dst, &RecordError{part, "member: " + fault}
	}
	at, ok := millis(r.RegisteredAt)
	if !ok {
		return dst, &RecordError{part, "the instant of registration does not fit in 64 bits of milliseconds"}
	}
	dst = binary.BigEndian.AppendUint16(dst, formatVersion)
	dst = appendString(dst, r.Member.name)
	return binary.BigEndian.AppendUint64(dst, uint64(at)), nil
}

func appendLease(dst []byte, l Lease) ([]byte, error) {
	const part = "lease"
	if fault := nameFault(l.Member.name, MaxMemberIDLen); fault != "" {
		return dst, &RecordError{part, "member: " + fault}
	}
	if l.Token.IsZero() {
		return dst, &RecordError{part, "it has no token"}
	}
	granted, grantedOK := millis(l.GrantedAt)
	deadline, deadlineOK := millis(l.Deadline)
	if !grantedOK || !deadlineOK {
		return dst, &RecordError{part, "its instants do not fit in 64 bits of milliseconds"}
	}
	dst = binary.BigEndian.AppendUint16(dst, formatVersion)
	dst = appendString(dst, l.Member.name)
	dst = binary.BigEndian.AppendUint64(dst, uint64(l.Token.id))
	dst = binary.BigEndian.AppendUint16(dst, uint16(l.Token.epoch))
	dst = binary.BigEndian.AppendUint64(dst, uint64(granted))
	return binary.BigEndian.AppendUint64(dst, uint64(deadline)), nil
}

func appendString(dst []byte, s string) []byte {
	dst = binary.BigEndian.AppendUint16(dst, uint16(len(s)))
	return append(dst, s...)
}

// millis returns an instant in milliseconds, and whether it fits.
func millis(t time.Time) (int64, bool) {
	ms := t.UnixMilli()
	return ms, time.UnixMilli(ms).Unix() == t.Unix()
}

// DecodeKey reads the key of a record. Its error is a [*RecordError].
func DecodeKey(b []byte) (Key, error) {
	d := decoder{part: "key", rest: b}
	d.version()
	kind := RecordKind(d.int16("kind"))
	if d.err == nil && kind != KindRegistration && kind != KindLease {
		d.fail("unknown " + kind.String())
	}
	role := d.name("role", MaxRoleLen, true)
	member := d.name("member", MaxMemberIDLen, kind == KindRegistration)
	d.end()
	if d.err == nil && kind == KindLease && member != "" {
		d.fail("a lease key names no member")
	}
	if d.err != nil {
		return Key{}, d.err
	}
	return Key{kind, Role{role}, MemberID{member}}, nil
}

// DecodeValue reads the value of a record of a kind; a nil value is a [Tombstone].
// Its error is a [*RecordError].
func DecodeValue(kind RecordKind, b []byte) (Record, error) {
	switch kind {
	case KindRegistration, KindLease:
	default:
		return nil, &RecordError{"key", "unknown " + kind.String()}
	}
	if b == nil {
		return Tombstone{}, nil
	}
	if kind == KindLease {
		lease, err := decodeLease(b)
		if err != nil {
			return nil, err
		}
		return lease, nil
	}
	registration, err := decodeRegistration(b)
	if err != nil {
		return nil, err
	}
	return registration, nil
}

func decodeRegistration(b []byte) (Registration, error) {
	d := decoder{part: "registration", rest: b}
	d.version()
	member := d.name("member", MaxMemberIDLen, true)
	at := d.int64("instant of registration")
	d.end()
	if d.err != nil {
		return Registration{}, d.err
	}
	return Registration{MemberID{member}, time.UnixMilli(at).UTC()}, nil
}

func decodeLease(b []byte) (Lease, error) {
	d := decoder{part: "lease", rest: b}
	d.version()
	member := d.name("member", MaxMemberIDLen, true)
	id := d.int64("producer id")
	epoch := d.int16("producer epoch")
	granted := d.int64("instant of the grant")
	deadline := d.int64("deadline")
	d.end()
	if d.err == nil && id < 0 {
		d.fail("negative producer id")
	}
	if d.err == nil && epoch < 0 {
		d.fail("negative producer epoch")
	}
	if d.err != nil {
		return Lease{}, d.err
	}
	return Lease{
		Member:    MemberID{member},
		Token:     FencingToken{id, epoch, true},
		GrantedAt: time.UnixMilli(granted).UTC(),
		Deadline:  time.UnixMilli(deadline).UTC(),
	}, nil
}

// A decoder reads fields until the first fault; everything after it is zero.
type decoder struct {
	part string
	rest []byte
	err  error
}

func (d *decoder) fail(reason string) {
	if d.err == nil {
		d.err = &RecordError{d.part, reason}
	}
	d.rest = nil
}

func (d *decoder) take(n int, field string) []byte {
	if d.err != nil {
		return nil
	}
	if len(d.rest) < n {
		d.fail(field + " is cut short")
		return nil
	}
	taken := d.rest[:n]
	d.rest = d.rest[n:]
	return taken
}

func (d *decoder) int16(field string) int16 {
	b := d.take(2, field)
	if b == nil {
		return 0
	}
	return int16(binary.BigEndian.Uint16(b))
}

func (d *decoder) int64(field string) int64 {
	b := d.take(8, field)
	if b == nil {
		return 0
	}
	return int64(binary.BigEndian.Uint64(b))
}

func (d *decoder) version() {
	if v := d.int16("version"); v != formatVersion && d.err == nil {
		d.fail("version " + strconv.Itoa(int(v)) + " is not supported")
	}
}

// name reads a string of at most limit bytes, which may be empty only where it is
// not required.
func (d *decoder) name(field string, limit int, required bool) string {
	n := int(d.int16(field))
	switch {
	case d.err != nil:
		return ""
	case n < 0:
		d.fail(field + ": negative length")
	case n == 0 && required:
		d.fail(field + ": empty")
	case n > limit:
		d.fail(field + ": " + strconv.Itoa(n) + " bytes long, more than " + strconv.Itoa(limit))
	}
	b := d.take(n, field)
	if !utf8.Valid(b) {
		d.fail(field + ": not UTF-8")
		return ""
	}
	return string(b)
}

func (d *decoder) end() {
	if d.err == nil && len(d.rest) > 0 {
		d.fail(strconv.Itoa(len(d.rest)) + " bytes too many")
	}
}

// RolePartition returns the partition of the state topic that holds a role's
// records, of a number of partitions: Kafka's own choice for the role as a key.
func RolePartition(role Role, partitions int32) (int32, error) {
	if err := validRole(role); err != nil {
		return 0, err
	}
	if partitions <= 0 {
		return 0, invalidConfig("%d partitions: a topic has at least 1", partitions)
	}
	// Kafka clears the sign bit; the absolute value would differ.
	return int32(murmur2(role.name)&0x7fffffff) % partitions, nil
}

// murmur2 is Kafka's variant of the hash: 32 bits, seed 0x9747b28c.
func murmur2(s string) uint32 {
	const (
		seed = 0x9747b28c
		mix  = 0x5bd1e995
	)
	h := uint32(seed) ^ uint32(len(s))
	for ; len(s) >= 4; s = s[4:] {
		k := uint32(s[0]) | uint32(s[1])<<8 | uint32(s[2])<<16 | uint32(s[3])<<24
		k *= mix
		k ^= k >> 24
		k *= mix
		h = h*mix ^ k
	}
	switch len(s) {
	case 3:
		h ^= uint32(s[2]) << 16
		fallthrough
	case 2:
		h ^= uint32(s[1]) << 8
		fallthrough
	case 1:
		h ^= uint32(s[0])
		h *= mix
	}
	h ^= h >> 13
	h *= mix
	return h ^ h>>15
}

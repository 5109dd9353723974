package coordination

import (
	"context"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"
)

// Transport is the seam between a candidate and the cluster: everything an
// [Elector] needs from Kafka, and nothing else. [BrokerTransport] implements
// it; package coordinationtest holds the conformance suite any other
// implementation has to pass.
//
// All methods are safe for concurrent use. A method that takes a context
// returns when that context ends. An error that retrying cannot cure wraps
// [ErrInvalidConfig] or [ErrTopicChanged] and says what to change; after Close
// every method returns [ErrClosed].
type Transport interface {
	// Follow starts a pushed stream of views of one role. It returns once
	// the stream exists, without waiting for the first view. The zero self is
	// an observer, which never creates the state topic; a member's own
	// registration is reported in [RoleView].Self and always kept.
	Follow(ctx context.Context, role Role, self MemberID) (Follower, error)

	// Read returns one view of a role that is at least as new as the moment
	// of the call.
	Read(ctx context.Context, role Role) (RoleView, error)

	// Roles delivers the roles that have records, sorted: first once the log
	// was read to its end, and again when there is a new one. Lists are
	// coalesced. A list with Err set is the last one. The stream ends with ctx.
	Roles(ctx context.Context) (<-chan RoleList, error)

	// Describe asks the transaction coordinator for the newest epoch of a
	// role. A role that nobody ever led is not an error: its status has no
	// token.
	Describe(ctx context.Context, role Role) (LeadershipStatus, error)

	// Register appends a registration and returns its offset, the member's
	// place in the order of succession.
	Register(ctx context.Context, role Role, registration Registration) (int64, error)

	// CommittedOffsets returns what a consumer group has committed, once
	// transactions that are being committed have settled.
	CommittedOffsets(ctx context.Context, group string) (kadm.OffsetResponses, error)

	// Withdraw appends a tombstone over a member's registration.
	Withdraw(ctx context.Context, role Role, member MemberID) error

	// NewTerm prepares a term without any request to the cluster.
	NewTerm(role Role, config TermConfig) (Term, error)

	// Draining is closed when a graceful shutdown starts: electors stop
	// campaigning, drain and resign.
	Draining() <-chan struct{}

	// Closed is closed when the transport is: every leadership on it ends
	// with [ErrClosed].
	Closed() <-chan struct{}
}

// A Follower is one subscription to the views of a role.
type Follower interface {
	// Views delivers the newest view whenever it changed. Views are
	// coalesced: a slow receiver skips to the newest and never holds up
	// others. A view with Err set is the last one.
	Views() <-chan RoleView

	// Barrier returns a view that contains everything that was stable in
	// the log at some moment after the call, together with what the
	// unstable tail tells: see [RoleView].Unstable. It fails when it cannot
	// prove that before ctx ends.
	Barrier(ctx context.Context) (RoleView, error)

	// LastContact is when the cluster last answered whoever feeds the views,
	// whether or not it had anything new. It never blocks.
	LastContact() time.Time

	// Close ends the subscription. It does not wait, and may be called
	// more than once.
	Close()
}

// A Term is the one object that can commit under an epoch. It is used in this
// order: Warm if wanted, Mint once, then Commit by one goroutine, then Close.
// Warm, Check, Err and Close are safe at any time.
type Term interface {
	// Warm opens the connections that Mint and Commit need, so that they find
	// them open. It changes nothing, and its failure means nothing.
	Warm(ctx context.Context) error

	// Mint makes the transaction coordinator issue a new epoch for the role,
	// which fences every earlier one. When Mint fails the epoch may have
	// been issued all the same; the term is over either way.
	Mint(ctx context.Context) (FencingToken, error)

	// Check tells, before they are part of a Commit, which records would be refused
	// for their topic: one that does not exist, may not be written to, or is the
	// state topic. The error is that of Commit, a [*RejectedError] for each. It
	// asks the cluster about topics it does not know yet, and blocks until the
	// answer, an attempt's timeout, or until ctx or the term ends; nil says that
	// nothing speaks against them so far.
	Check(ctx context.Context, records []*kgo.Record) error

	// Commit writes a batch in one transaction and returns the offset of
	// its lease record, or -1 for a batch without one.
	//
	// The error tells what became of it. nil: committed. [ErrNotHeld] in its
	// chain: nothing was committed and the term is over. [*RejectedError]:
	// nothing was committed, and the term goes on; several of them are joined,
	// one for each record that was refused. [*OutcomeUnknownError]:
	// the commit was asked for and no answer came; the term is over. After
	// any other error nothing was committed, and Err tells whether the term
	// goes on. When ctx ends in the middle the term is over.
	Commit(ctx context.Context, batch Batch) (int64, error)

	// Err returns nil while the term can commit again, and otherwise why
	// not. Commit may return nil and end the term: see [ErrUnanswered].
	Err() error

	// Close ends the term at once and frees a Commit that is under way. An
	// open transaction is left to the coordinator, which aborts it.
	Close()
}

// TermConfig parametrises [Transport].NewTerm.
type TermConfig struct {
	// TransactionTimeout is how long the coordinator leaves a transaction
	// of this term open before it aborts it and fences the term.
	TransactionTimeout time.Duration

	// AttemptTimeout is how long one request may stay unanswered before it
	// is tried on a new connection.
	AttemptTimeout time.Duration

	// StallTimeout is how long a transaction waits for a partition, or for a
	// coordinator, that answers but does not take what it gets. Then the
	// transaction is aborted, in time for the lease to be renewed. Zero is one
	// second.
	StallTimeout time.Duration

	// ProducerOptions are the user's options for the term's client.
	ProducerOptions []kgo.Opt
}

// A Batch is what one transaction of a term writes, in the order of its
// fields: the lease record is the last one before the commit, so that the
// partition that all roles share is part of an open transaction as briefly as
// can be.
type Batch struct {
	// Records are the user's.
	Records []*kgo.Record

	// More is called, where Ready is not nil, each time Ready delivers while
	// Records are being written, and returns further records for the same
	// transaction: what has come up since. Errors count them after Records.
	More  func() []*kgo.Record
	Ready <-chan struct{}

	// Offsets are those of consumer groups. They need a record or a lease
	// beside them.
	Offsets []GroupOffsets

	// Withdraw lists members whose registration is tombstoned.
	Withdraw []MemberID

	// Lease is a [Lease], a [Tombstone], or nil for neither.
	Lease Record
}

// RoleView is what a transport knows of a role: the fold of its records, and
// when and where the records that matter were seen. Slices and pointers in it
// are the receiver's own.
type RoleView struct {
	Role      Role
	ClusterID string

	// State is the fold of the authentic records.
	State RoleState

	// LeaseStamp tells of the newest authentic record under the lease key,
	// be it a lease or a tombstone; nil if there was none.
	LeaseStamp *RecordStamp

	// Newest is the newest known token of the role: that of the lease, or of
	// the batch that carried its tombstone. It is zero if nobody led yet.
	Newest FencingToken

	// Self tells of the subscriber's own registration, nil while there is
	// none.
	Self *RecordStamp

	// Unreadable tells of a record under the lease key that the role's
	// current leader wrote and that this version cannot decode: a lease
	// whose holder is unknown. Nil if there is none newer than the lease.
	Unreadable *RecordStamp

	// Unstable is set by a barrier that found the last stable offset below
	// the high watermark: somebody has a transaction open in the partition,
	// and what was committed behind it is not visible yet.
	Unstable bool

	// SignOfLife tells of the newest lease record of this role in the
	// unstable part of the log, with the lease it carries.
	SignOfLife *LifeSign

	// Position is the offset below which everything was folded.
	Position int64

	// Uncounted is the number of registrations beyond those in the roster.
	Uncounted int

	// Problems lists what was skipped, newest last; a few are kept.
	Problems []Problem

	// Err is why the stream ended; such a view is the last one.
	Err error
}

// A RoleList is one element of [Transport].Roles.
type RoleList struct {
	Roles []Role
	Err   error
}

// A RecordStamp tells when and where a record was seen.
type RecordStamp struct {
	Offset int64

	// Token is the producer id and epoch of the record's batch, zero if the
	// batch was not transactional.
	Token FencingToken

	// AppendedAt is the record's timestamp. It is the broker's clock when
	// LogAppendTime is set, and otherwise the word of whoever wrote it.
	AppendedAt    time.Time
	LogAppendTime bool

	// LeaderEpoch is the epoch of the partition leader that appended it. Two
	// append times may be compared only within one.
	LeaderEpoch int32

	// SeenAt is the local instant of the first sight, with its monotonic
	// reading.
	SeenAt time.Time
}

// A LifeSign is a lease record that is not stable yet: see
// [RoleView].SignOfLife.
type LifeSign struct {
	RecordStamp
	Lease Lease
}

// A Problem is a record that was skipped.
type Problem struct {
	Partition int32
	Offset    int64
	Err       error
}

// TransactionState is what a transaction coordinator says about the newest
// transaction of a role, in Kafka's own words.
type TransactionState string

// The states Kafka knows.
const (
	TransactionEmpty             TransactionState = "Empty"
	TransactionOngoing           TransactionState = "Ongoing"
	TransactionPrepareCommit     TransactionState = "PrepareCommit"
	TransactionPrepareAbort      TransactionState = "PrepareAbort"
	TransactionCompleteCommit    TransactionState = "CompleteCommit"
	TransactionCompleteAbort     TransactionState = "CompleteAbort"
	TransactionPrepareEpochFence TransactionState = "PrepareEpochFence"
	TransactionDead              TransactionState = "Dead"
)

// LeadershipStatus is the transaction coordinator's answer to who leads: the
// newest epoch of a role. It knows nothing of leases or members.
type LeadershipStatus struct {
	Role Role

	// State is that of the role's newest transaction.
	State TransactionState

	// StartedAt is when an ongoing transaction started, by the
	// coordinator's clock; zero if none is ongoing.
	StartedAt time.Time

	// TransactionTimeout is how long the coordinator leaves one open.
	TransactionTimeout time.Duration

	// Coordinator is the node id of the broker that answered.
	Coordinator int32

	token FencingToken
}

// NewLeadershipStatus is for implementations of [Transport]. The zero token
// says that nobody led the role yet.
func NewLeadershipStatus(role Role, token FencingToken, state TransactionState) LeadershipStatus {
	return LeadershipStatus{Role: role, State: state, token: token}
}

// Token returns the newest token of the role, and false if nobody led it yet.
func (s LeadershipStatus) Token() (FencingToken, bool) { return s.token, !s.token.IsZero() }

// Authoritative reports whether token is the newest epoch of the role: no
// newer one has been minted, and brokers still accept its writes. It does not
// say that the holder is alive: it stays true after a resignation until the
// next member takes over. The zero token is never authoritative.
func (s LeadershipStatus) Authoritative(token FencingToken) bool {
	return !token.IsZero() && s.token == token
}

// DescribeLeadership asks who leads a role, with one request to its transaction
// coordinator: no membership, no consumer, and no more permission than Describe
// on the transactional id. It blocks until the answer or until ctx ends, and is
// safe for concurrent use.
func DescribeLeadership(ctx context.Context, transport Transport, role Role) (LeadershipStatus, error) {
	if err := validTransport(transport); err != nil {
		return LeadershipStatus{}, err
	}
	if err := validRole(role); err != nil {
		return LeadershipStatus{}, err
	}
	return transport.Describe(ctx, role)
}

// validTransport refuses what is no transport.
func validTransport(transport Transport) error {
	if broker, ok := transport.(*BrokerTransport); transport == nil || ok && (broker == nil || broker.admin == nil) {
		return invalidConfig("the transport is nil or a zero value: make one with NewBrokerTransport")
	}
	return nil
}

package coordination

import (
	"context"
	"errors"
	"fmt"

	"github.com/twmb/franz-go/pkg/kgo"
)

// ErrNotHeld is the umbrella over every end of a leadership: errors.Is(err,
// ErrNotHeld) holds for each of the reasons below. A call that returns it has
// committed nothing.
var ErrNotHeld = errors.New("the role is not held")

// The reasons for which a leadership ends.
var (
	// ErrFenced: a newer epoch of the role was minted; brokers refuse this
	// one.
	ErrFenced error = &endError{"a newer epoch of the role was minted"}

	// ErrLeaseExpired: the lease was not renewed before its deadline.
	ErrLeaseExpired error = &endError{"the lease expired"}

	// ErrResigned: the leader gave the role up.
	ErrResigned error = &endError{"the leader resigned"}

	// ErrUnanswered: an attempt of a transaction ended without an answer, and
	// could still take effect in the middle of a later one. The member mints a
	// new epoch at once if it campaigns again.
	ErrUnanswered error = &endError{"a transaction request went unanswered"}

	// ErrClosed: the transport was closed or shut down.
	ErrClosed error = &endError{"the transport is closed"}
)

// An endError is one of the reasons for which a leadership ends.
type endError struct{ reason string }

func (e *endError) Error() string { return e.reason }

func (e *endError) Is(target error) bool { return target == ErrNotHeld }

var (
	// ErrInvalidConfig is in the chain of every error that retrying cannot
	// cure, and whose text says what to change.
	ErrInvalidConfig = errors.New("invalid configuration")

	// ErrTopicChanged: the state topic was deleted, created again, or given
	// another number of partitions, under running members.
	ErrTopicChanged = errors.New("the state topic changed")

	// ErrElectorBusy: another Campaign or Run of the same elector is under
	// way.
	ErrElectorBusy = errors.New("another campaign of this elector is under way")

	// ErrOutcomeUnknown is what every [*OutcomeUnknownError] is.
	ErrOutcomeUnknown = errors.New("the outcome of the commit is unknown")
)

// invalidConfig formats an error that wraps ErrInvalidConfig.
func invalidConfig(format string, args ...any) error {
	return fmt.Errorf("%w: %w", ErrInvalidConfig, fmt.Errorf(format, args...))
}

// A RecordError is a record that the codec refuses to encode or to decode.
type RecordError struct {
	// Part is what was being read or written: "key", "registration" or
	// "lease".
	Part string

	// Reason says what is wrong with it.
	Reason string
}

func (e *RecordError) Error() string {
	return "coordination record: " + e.Part + ": " + e.Reason
}

// A RejectedError is a call of which a record was refused, by the client or by the
// partition's leader. Nothing of the call was committed; the leadership goes on.
type RejectedError struct {
	// Index is the position of the record in the call, or -1 where the
	// offsets of a consumer group were refused.
	Index int

	// Record is the record, nil if none was passed there.
	Record *kgo.Record

	// Err is the reason, with Kafka's error code in its chain if it gave one.
	Err error
}

func (e *RejectedError) Error() string {
	if e.Index < 0 {
		return fmt.Sprintf("offsets were rejected: %v", e.Err)
	}
	if e.Record == nil {
		return fmt.Sprintf("record %d was rejected: %v", e.Index, e.Err)
	}
	return fmt.Sprintf("record %d for topic %s was rejected: %v", e.Index, e.Record.Topic, e.Err)
}

// Unwrap returns the reason.
func (e *RejectedError) Unwrap() error { return e.Err }

// An OutcomeUnknownError is a commit that was asked for and never answered: it
// may have taken effect, and may still do so. The leadership under which it was
// asked for is over. It is [ErrOutcomeUnknown], and never [ErrNotHeld].
type OutcomeUnknownError struct {
	// Role and Token are those of the leadership.
	Role  Role
	Token FencingToken

	// Err is what the client last saw.
	Err error

	settle func(context.Context) (bool, error)
}

// NewOutcomeUnknownError is for implementations of [Transport]. settle is what
// Resolve calls.
func NewOutcomeUnknownError(role Role, token FencingToken, err error, settle func(context.Context) (bool, error)) *OutcomeUnknownError {
	return &OutcomeUnknownError{Role: role, Token: token, Err: err, settle: settle}
}

// Resolve finds out whether the transaction was committed. It asks the transaction
// coordinator, tells it again to commit where it still can, and otherwise reads the
// log. It blocks until the answer is certain or ctx ends, and uses the transport of
// the leadership, which must be open. It may be called more than once, by anybody.
//
// It fails with ctx's cause, with [ErrClosed], or where the log can no longer tell,
// because compaction or retention may have removed the records.
func (e *OutcomeUnknownError) Resolve(ctx context.Context) (committed bool, err error) {
	if e.settle == nil {
		return false, invalidConfig("role %s: token %s: there is nobody to ask: a transport passes a function to NewOutcomeUnknownError", e.Role, e.Token)
	}
	committed, err = e.settle(ctx)
	if err != nil {
		return false, fmt.Errorf("role %s: token %s: resolve the commit: %w", e.Role, e.Token, err)
	}
	return committed, nil
}

func (e *OutcomeUnknownError) Error() string {
	return fmt.Sprintf("role %s: token %s: %v: %v", e.Role, e.Token, ErrOutcomeUnknown, e.Err)
}

// Is reports whether target is ErrOutcomeUnknown.
func (e *OutcomeUnknownError) Is(target error) bool { return target == ErrOutcomeUnknown }

// Unwrap returns what the client last saw, unless that would make the error one
// that promises that nothing was committed.
func (e *OutcomeUnknownError) Unwrap() error {
	if errors.Is(e.Err, ErrNotHeld) {
		return nil
	}
	return e.Err
}

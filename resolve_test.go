package coordination

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestWhatTheCoordinatorTellsOfAnUnknownCommit(t *testing.T) {
	mine := token(7, 3)
	for _, c := range []struct {
		described FencingToken
		state     TransactionState
		want      finding
	}{
		{mine, TransactionOngoing, findingOpen},
		{mine, TransactionPrepareCommit, findingEnding}, // its log entry may not be replicated yet
		{mine, TransactionPrepareAbort, findingEnding},
		{mine, TransactionPrepareEpochFence, findingEnding},
		{mine, TransactionCompleteCommit, findingSettled},
		{mine, TransactionCompleteAbort, findingSettled},
		{mine, TransactionEmpty, findingSettled},
		{token(7, 4), TransactionOngoing, findingSettled}, // a successor's
		{token(9, 0), TransactionEmpty, findingSettled},
		{FencingToken{}, TransactionEmpty, findingSettled},
	} {
		status := NewLeadershipStatus(testRole, c.described, c.state)
		require.Equal(t, c.want, findingOf(mine, status), "%+v", c)

		committed, err := committedBy(mine, status)
		if c.described == mine && (c.state == TransactionCompleteCommit || c.state == TransactionCompleteAbort) {
			require.NoError(t, err)
			require.Equal(t, c.state == TransactionCompleteCommit, committed)
		} else {
			require.Error(t, err, "it stays unknown")
		}
	}
}

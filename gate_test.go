package coordination_test

import (
	"math"
	"sync"
	"testing"

	coordination "github.com/krabka-io/krabka-coordination-go"
	"github.com/stretchr/testify/require"
)

func TestGateNeverGoesBack(t *testing.T) {
	var gate coordination.Gate
	_, any := gate.Newest()
	require.False(t, any)
	for _, step := range []struct {
		n    int64
		want bool
	}{{-1, false}, {0, true}, {0, true}, {7, true}, {6, false}, {7, true}, {math.MaxInt64, true}, {8, false}, {math.MaxInt64, true}, {math.MinInt64, false}} {
		require.Equal(t, step.want, gate.Admit(step.n), "%d", step.n)
	}
	newest, any := gate.Newest()
	require.True(t, any)
	require.EqualValues(t, math.MaxInt64, newest)
}

func TestGateUnderConcurrency(t *testing.T) {
	var (
		gate coordination.Gate
		wg   sync.WaitGroup
	)
	for n := range int64(1000) {
		wg.Go(func() { gate.Admit(n) })
	}
	wg.Wait()
	newest, _ := gate.Newest()
	require.EqualValues(t, 999, newest)
	require.False(t, gate.Admit(998))
}

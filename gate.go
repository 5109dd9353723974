package coordination

import "sync/atomic"

// A Gate admits fencing numbers that do not go back. It is for a service in front of
// something that cannot check them itself: put one before what it guards, and admit
// each request by the [Leadership.FencingNumber] that it carries.
//
// A gate lives in the memory of its process: when that starts again, it admits an
// old leader until the first request of a newer one. Where that is not good enough,
// keep the number with the data.
//
// It is safe for concurrent use. The zero value has admitted nothing.
type Gate struct{ newest atomic.Uint64 } // the greatest number admitted, plus one

// Admit reports whether n is at least the greatest number admitted so far, and
// remembers it if it is. Negative numbers are never admitted.
func (g *Gate) Admit(n int64) bool {
	if n < 0 {
		return false
	}
	mine := uint64(n) + 1
	for {
		newest := g.newest.Load()
		if mine < newest {
			return false
		}
		if mine == newest || g.newest.CompareAndSwap(newest, mine) {
			return true
		}
	}
}

// Newest returns the greatest number admitted so far, and false if there was none.
func (g *Gate) Newest() (int64, bool) {
	newest := g.newest.Load()
	return int64(newest - 1), newest > 0
}

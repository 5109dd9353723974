// Command tokencheck puts an HTTP service behind fencing tokens: a request carries the
// token of the leader that sends it, and the service asks the cluster whether that
// is still the newest one. It needs Describe on the transactional id, no membership
// and no state of its own.
//
// The answer is kept for a moment, so that not every request costs one to Kafka. That
// has its price: for as long as an answer is kept, a leader that was deposed since is
// still let in. Where that is too long, keep no answer, or guard the data itself with
// fencing numbers.
//
//	go run ./examples/tokencheck
package main

import (
	"context"
	"crypto/rand"
	"errors"
	"flag"
	"fmt"
	"log"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"time"

	coordination "github.com/krabka-io/krabka-coordination-go"
	"github.com/krabka-io/krabka-coordination-go/coordinationtest"
)

// tokenHeader carries the token of a request.
const tokenHeader = "Fencing-Token"

// A Checker lets requests in that carry the newest token of a role.
type Checker struct {
	Transport coordination.Transport
	Role      coordination.Role
	MaxAge    time.Duration // for which an answer is kept
	Next      http.Handler

	mu     sync.Mutex // guards what follows, and lets one request ask at a time
	status coordination.LeadershipStatus
	asked  time.Time
}

func (c *Checker) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	token, err := coordination.ParseFencingToken(r.Header.Get(tokenHeader))
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	switch ok, err := c.authoritative(r.Context(), token); {
	case err != nil:
		// Nobody is let in on a guess.
		http.Error(w, "who leads could not be asked: "+err.Error(), http.StatusServiceUnavailable)
	case !ok:
		http.Error(w, "token "+token.String()+" is not the newest one of role "+c.Role.String(), http.StatusConflict)
	default:
		c.Next.ServeHTTP(w, r)
	}
}

func (c *Checker) authoritative(ctx context.Context, token coordination.FencingToken) (bool, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	// A token that is not the kept one may be newer: ask again.
	if time.Since(c.asked) < c.MaxAge && c.status.Authoritative(token) {
		return true, nil
	}
	asked := time.Now() // the answer is as old as the question
	status, err := coordination.DescribeLeadership(ctx, c.Transport, c.Role)
	if err != nil {
		return false, err
	}
	c.status, c.asked = status, asked
	return status.Authoritative(token), nil
}

func main() {
	log.SetFlags(0)
	brokers := flag.String("brokers", "", "host:port,... of a real Kafka; an embedded cluster if empty")
	flag.Parse()
	if err := run(*brokers); err != nil {
		log.Fatal(err)
	}
}

func run(brokers string) error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	addresses := strings.Split(brokers, ",")
	if brokers == "" {
		cluster, err := coordinationtest.NewCluster()
		if err != nil {
			return err
		}
		defer cluster.Close()
		addresses = cluster.Brokers()
	}
	quiet := coordination.WithLogger(slog.New(slog.DiscardHandler))
	transport, err := coordination.NewBrokerTransport(ctx, addresses, quiet, coordination.WithReplication(1))
	if err != nil {
		return err
	}
	defer transport.Close()
	role := coordination.MustRole("vault-" + rand.Text()[:8])

	const maxAge = 300 * time.Millisecond
	vault := httptest.NewServer(&Checker{
		Transport: transport, Role: role, MaxAge: maxAge,
		Next: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "stored") }),
	})
	defer vault.Close()

	lead := func(name string) (*coordination.Leadership, error) {
		elector, err := coordination.NewElector(transport, role, coordination.MustMemberID(name), quiet)
		if err != nil {
			return nil, err
		}
		return elector.Campaign(ctx)
	}
	expect := func(who string, token string, want int) error {
		got, err := put(ctx, vault.URL, token)
		if err != nil {
			return err
		}
		fmt.Printf("%-34s %s\n", who, http.StatusText(got))
		if got != want {
			return fmt.Errorf("%s: answered %d instead of %d", who, got, want)
		}
		return nil
	}

	alpha, err := lead("alpha")
	if err != nil {
		return err
	}
	old := alpha.Token().String()
	first := expect("alpha, the leader:", old, http.StatusOK)
	nonsense := expect("somebody without a token:", "?", http.StatusBadRequest)
	forged := expect("somebody with another token:", "4711:0", http.StatusConflict)
	if err := errors.Join(first, nonsense, forged); err != nil {
		return err
	}
	if err := alpha.Resign(ctx); err != nil {
		return err
	}
	bravo, err := lead("bravo")
	if err != nil {
		return err
	}
	if err := expect("bravo, the next leader:", bravo.Token().String(), http.StatusOK); err != nil {
		return err
	}
	// What was kept about alpha was replaced by the answer about bravo; at the
	// latest it would have been after maxAge.
	if err := expect("alpha, deposed:", old, http.StatusConflict); err != nil {
		return err
	}
	return bravo.Resign(ctx)
}

func put(ctx context.Context, url, token string) (int, error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodPut, url, nil)
	if err != nil {
		return 0, err
	}
	request.Header.Set(tokenHeader, token)
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return 0, err
	}
	return response.StatusCode, response.Body.Close()
}

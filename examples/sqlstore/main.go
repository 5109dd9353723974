// Command sqlstore guards a table outside Kafka with fencing numbers: each row keeps
// the number of the leader that last wrote it, and an update that carries a smaller
// one changes nothing. A leader that was deposed, and does not know, is refused by
// the database.
//
//	go run .                               an embedded cluster
//	go run . -brokers localhost:9092       a real Kafka
package main

import (
	"context"
	"crypto/rand"
	"database/sql"
	"errors"
	"flag"
	"fmt"
	"log"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"time"

	coordination "github.com/krabka-io/krabka-coordination-go"
	"github.com/krabka-io/krabka-coordination-go/coordinationtest"
	_ "modernc.org/sqlite"
)

// ErrStale is what a write under an old fencing number gets.
var ErrStale = errors.New("a newer leader has written: this one is deposed")

// A Ledger is the table.
type Ledger struct{ db *sql.DB }

// OpenLedger opens the database and makes sure of the table.
func OpenLedger(path string) (*Ledger, error) {
	db, err := sql.Open("sqlite", path)
	if err != nil {
		return nil, err
	}
	_, err = db.Exec(`CREATE TABLE IF NOT EXISTS accounts (
		name    TEXT PRIMARY KEY,
		balance INTEGER NOT NULL,
		fence   INTEGER NOT NULL
	)`)
	return &Ledger{db}, err
}

// Close closes the database.
func (l *Ledger) Close() error { return l.db.Close() }

// Add changes a balance on behalf of the leader with a fencing number. The check and
// the change are one statement: nothing can come in between.
func (l *Ledger) Add(ctx context.Context, fence int64, account string, amount int64) error {
	done, err := l.db.ExecContext(ctx, `
		INSERT INTO accounts (name, balance, fence) VALUES ($1, $2, $3)
		ON CONFLICT (name) DO UPDATE SET balance = balance + $2, fence = $3 WHERE fence <= $3`,
		account, amount, fence)
	if err != nil {
		return err
	}
	changed, err := done.RowsAffected()
	if err == nil && changed == 0 {
		return fmt.Errorf("account %s, fencing number %d: %w", account, fence, ErrStale)
	}
	return err
}

// Balance reads a balance.
func (l *Ledger) Balance(ctx context.Context, account string) (balance int64, err error) {
	err = l.db.QueryRowContext(ctx, `SELECT balance FROM accounts WHERE name = $1`, account).Scan(&balance)
	return balance, err
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
	dir, err := os.MkdirTemp("", "sqlstore")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	ledger, err := OpenLedger(filepath.Join(dir, "ledger.db"))
	if err != nil {
		return err
	}
	defer ledger.Close()

	role := coordination.MustRole("ledger-" + rand.Text()[:8])
	alpha, err := lead(ctx, addresses, role, "alpha")
	if err != nil {
		return err
	}
	defer alpha.transport.Close()
	old := alpha.leadership.FencingNumber()
	if err := ledger.Add(ctx, old, "alice", 100); err != nil {
		return err
	}
	fmt.Printf("alpha leads, fencing number %d: alice +100\n", old)

	// alpha's process stops for longer than its lease. Here its transport is
	// closed, which tells nobody; what it knows is its old number.
	alpha.transport.Close()
	bravo, err := lead(ctx, addresses, role, "bravo")
	if err != nil {
		return err
	}
	defer bravo.transport.Close()
	if err := ledger.Add(ctx, bravo.leadership.FencingNumber(), "alice", -30); err != nil {
		return err
	}
	fmt.Printf("bravo leads, fencing number %d: alice -30\n", bravo.leadership.FencingNumber())

	err = ledger.Add(ctx, old, "alice", -100)
	if !errors.Is(err, ErrStale) {
		return fmt.Errorf("the zombie's write was not refused: %v", err)
	}
	fmt.Printf("alpha wakes as a zombie: alice -100: refused: %v\n", err)

	balance, err := ledger.Balance(ctx, "alice")
	if err != nil {
		return err
	}
	if balance != 70 {
		return fmt.Errorf("alice has %d instead of 70", balance)
	}
	fmt.Printf("alice has %d\n", balance)
	return bravo.leadership.Resign(ctx)
}

// A member is one process of the service.
type member struct {
	transport  *coordination.BrokerTransport
	leadership *coordination.Leadership
}

func lead(ctx context.Context, brokers []string, role coordination.Role, name string) (member, error) {
	quiet := coordination.WithLogger(slog.New(slog.DiscardHandler))
	transport, err := coordination.NewBrokerTransport(ctx, brokers, quiet, coordination.WithReplication(1))
	if err != nil {
		return member{}, err
	}
	lease, err := coordination.LeaseConfigFor(2 * time.Second)
	if err != nil {
		return member{}, err
	}
	elector, err := coordination.NewElector(transport, role, coordination.MustMemberID(name), quiet, coordination.WithLease(lease))
	if err != nil {
		return member{}, err
	}
	l, err := elector.Campaign(ctx)
	return member{transport, l}, err
}

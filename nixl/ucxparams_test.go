package nixl

import (
	"runtime"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
)

// Natively split_batch_size=0 divides by zero at the first READ, and too many workers take minutes with the agent locked.
func TestUCXParametersThatCrashAreRefused(t *testing.T) {
	a, err := NewAgent("", Config{})
	require.NoError(t, err)
	defer a.Close()
	for key, values := range map[string][]string{
		"split_batch_size": {"0", "-1", "many", "", "4294967296"}, "num_workers": {"-1", "1025", "2147483648", "1e3"}, "num_threads": {"-1", "1025", "x"},
	} {
		for _, v := range values {
			_, err := a.CreateBackend("UCX", map[string]string{key: v})
			require.ErrorIs(t, err, ErrInvalid, "%s=%s", key, v)
			require.ErrorContains(t, err, key)
		}
	}
	_, err = a.CreateBackend("UCX", map[string]string{"split_batch_size": "1", "num_threads": "0", "num_workers": "1"})
	require.NoError(t, err)
}

// forgetWorkers spares the tests after this one the workers that it asks for. No thread that lives on may have taken one: in an
// engine of a later test, at the same address, it would take that worker again, which is not there. So the test's own ends with it.
func forgetWorkers(t *testing.T) {
	runtime.LockOSThread()
	before := ucxWorkers.Load()
	t.Cleanup(func() { ucxWorkers.Store(before) })
}

// Natively a UCX backend at the address of a closed agent's takes the workers of its threads, which may lie behind its own: the
// next notification crashes.
func TestBackendAfterOneWithMoreWorkersHasAsMany(t *testing.T) {
	const threads, workers = 4, "4"
	given := map[string]string{"num_workers": "1"}
	forgetWorkers(t)
	work := make(chan func())
	defer close(work)
	for range threads { // the same OS threads every time, each of which takes a worker
		go func() {
			runtime.LockOSThread()
			for f := range work {
				f()
			}
		}()
	}
	o := newUCX(t, Config{})
	md, err := o.LocalMetadata()
	require.NoError(t, err)
	for range 3 {
		for _, params := range []map[string]string{{"num_workers": workers}, nil, given} {
			r, err := NewAgent("", Config{})
			require.NoError(t, err)
			_, err = r.CreateBackend("UCX", params)
			require.NoError(t, err)
			_, err = r.LoadRemote(md)
			require.NoError(t, err)
			var ready, done sync.WaitGroup
			ready.Add(threads)
			for range threads {
				done.Add(1)
				work <- func() {
					defer done.Done()
					ready.Done()
					ready.Wait()
					if err := r.Notify(o.Name(), []byte("x")); err != nil {
						t.Error(err)
					}
				}
			}
			done.Wait()
			require.NoError(t, r.Close())
		}
	}
	raised, err := ucxParams("test", map[string]string{"num_threads": "3"})
	require.NoError(t, err)
	require.Equal(t, "7", raised["num_workers"], "three are its threads' own")
	raised, err = ucxParams("test", given)
	require.NoError(t, err)
	require.Equal(t, workers, raised["num_workers"])
	require.Equal(t, map[string]string{"num_workers": "1"}, given, "the caller's map is the caller's")
}

// Natively every transfer that the thread makes with the second agent is -2, if its engine lies where the first's was: the thread
// still has a worker of the first. Closing forgets that, but only for the thread that closes.
func TestTransfersOfAThreadThatHadAWorkerOfAClosedAgent(t *testing.T) {
	forgetWorkers(t)
	work, done := make(chan func()), make(chan struct{})
	defer close(work)
	go func() {
		runtime.LockOSThread()
		for f := range work {
			f()
			done <- struct{}{}
		}
	}()
	owner := newUCX(t, Config{})
	src, dst := registered(t, owner, 4096), mustBuffer(t, 4096)
	for round := range 5 {
		for _, params := range []map[string]string{{"num_workers": "2"}, nil, {"num_threads": "1"}} {
			r, err := NewAgent("", Config{})
			require.NoError(t, err)
			_, err = r.CreateBackend("UCX", params)
			require.NoError(t, err)
			_, err = r.Register(dst)
			require.NoError(t, err)
			introduce(t, owner, r)
			remote, err := r.PrepareRemote(owner.Name(), DRAM, blocks(src, 4096))
			require.NoError(t, err)
			local, err := r.PrepareLocal(DRAM, blocks(dst, 4096))
			require.NoError(t, err)
			var x *Transfer
			work <- func() { x, err = r.NewTransfer(Read, local, nil, remote, nil, TransferOptions{}) }
			<-done
			require.NoError(t, err, "round %d, %v", round, params)
			finish(t, x)
			require.NoError(t, r.Close())
		}
	}
}

package lease
import ("testing";"time")
func TestDbg(t *testing.T){
 a:=t0.AddDate(1e6,0,0); b:=t0.AddDate(2e6,0,0)
 t.Log(a.Sub(time.Time{}), b.Sub(time.Time{}), a, b)
	r := newRank(t, 2)
	r.admit("a", 11, 0)
	r.grant(time.Time{}, "a", 11, 30)
 t.Log(r.epoch, r.started, r.due, r.hot)
}
